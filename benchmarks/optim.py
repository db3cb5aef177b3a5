"""Measure optimizer wrappers: ratios within one run, of medians over interleaved repetitions.

    python -m benchmarks.optim [--small] [--json FILE]

(a) accumulation over 4 iterations, AdamW: the optimizer's part against optax.MultiSteps (aim: at most 1/5), and whole
    windows against 4 bare gradient computations and one update (aim: at most 1.05)
(b) a tree of 1,000 leaves: one group against optax's chain (aim: at most 1.1); 10 and 100 groups against one, a step
    (aim: at most 1.1) and the time to compile it (aim: at most 1.5)
(c) loss scaling on against off (aim: at most 1.05)
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.report import write_ratios
from jengine.optim import AdamW, AmpOptimWrapper, OptimWrapper


def seconds(fn, *args):
    """Return the wall time of one call, results waited for, and the results."""
    start = time.perf_counter()
    out = jax.block_until_ready(fn(*args))
    return time.perf_counter() - start, out


def medians(subjects, repeat):
    """Return median seconds of each subject, `name -> fn()`, called in turns so that slow moments affect all."""
    times = {name: [] for name in subjects}
    for _ in range(repeat):
        for name, fn in subjects.items():
            times[name].append(fn())
    return {name: statistics.median(values) for name, values in times.items()}


class Loop:
    """Hold state that is donated from step to step."""

    def __init__(self, *state):
        self.state = jax.tree.map(jnp.array, state)

    def run(self, fn, *args):
        """Return seconds of `state = fn(*state, *args)`."""
        spent, self.state = seconds(fn, *self.state, *args)
        return spent


def make_update(wrapper):
    """Return the compiled update of a wrapper."""

    def update(params, state, grads, hyperparams):
        return wrapper.apply_gradients(grads, state, params, hyperparams)

    return jax.jit(update, donate_argnums=(0, 1))


def make_optax(tx):
    """Return the compiled update of an optax chain."""

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(update, donate_argnums=(0, 1))


def big_params(size):
    """Return eight matrices of `size` parameters together."""
    rng = np.random.default_rng(0)
    return {f"layer{i}": rng.normal(size=(size // 8 // 1024, 1024)).astype(np.float32) for i in range(8)}


def examples(size):
    """Return a batch of 1,024: gradients then take several times as long as an update, as in training."""
    return jnp.asarray(np.random.default_rng(1).normal(size=(1024, size // 8 // 1024)).astype(np.float32))


def loss(params, x):
    """Return a sum over the matrices, so that all have gradients."""
    return sum(jnp.mean(jnp.tanh(x @ w) ** 2) for w in params.values())


def accumulation(size, repeat):
    """Print (a); return the ratios."""
    params = big_params(size)
    wrapper = OptimWrapper(AdamW(lr=1e-3), accumulative_counts=4)
    wrapper.initialize_count_status(0, -1)
    hyperparams = wrapper.hyperparams
    grads = jax.tree.map(lambda p: jnp.asarray(p * 0.01), params)
    multi = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=4)
    update, accumulate = (
        make_update(wrapper),
        jax.jit(lambda p, s, g: (p, wrapper.accumulate(g, s)), donate_argnums=(0, 1)),
    )
    multi_step, adamw = make_optax(multi), make_optax(optax.adamw(1e-3))
    ours, theirs = Loop(params, wrapper.init(params)), Loop(params, multi.init(params))
    subjects = {
        "jengine": lambda: sum(ours.run(accumulate, grads) for _ in range(3)) + ours.run(update, grads, hyperparams),
        "MultiSteps": lambda: sum(theirs.run(multi_step, grads) for _ in range(4)),
    }
    times = medians(subjects, repeat)
    ours_ms, multi_ms = times["jengine"] * 1e3, times["MultiSteps"] * 1e3
    print(f"(a) {size / 1e6:.0f} M parameters, optimizer part of 4 iterations: {ours_ms:.0f} ms, "
          f"MultiSteps {multi_ms:.0f} ms: {multi_ms / ours_ms:.2f} times faster")  # fmt: skip
    ratios = {"optim, accumulation over MultiSteps": ours_ms / multi_ms}

    batch = examples(size)
    value_and_grad = wrapper.value_and_grad(loss)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def micro_step(params, state, x):
        _, grads = value_and_grad(params, state, x)
        return params, wrapper.accumulate(grads, state)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def last_step(params, state, x, hyperparams):
        _, grads = value_and_grad(params, state, x)
        return wrapper.apply_gradients(grads, state, params, hyperparams)

    bare_grads = jax.jit(jax.grad(loss))
    ours, bare = Loop(params, wrapper.init(params)), Loop(params, optax.adamw(1e-3).init(params))

    def bare_window():
        spent = 0.0
        for _ in range(4):
            time_of_one, grads = seconds(bare_grads, bare.state[0], batch)
            spent += time_of_one
        return spent + bare.run(adamw, grads)

    def window():
        return sum(ours.run(micro_step, batch) for _ in range(3)) + ours.run(last_step, batch, hyperparams)

    times = medians({"jengine": window, "bare": bare_window}, repeat)
    ours_ms, bare_ms = times["jengine"] * 1e3, times["bare"] * 1e3
    print(f"(a) a window of 4 iterations: {ours_ms:.0f} ms, "
          f"4 gradients and an update {bare_ms:.0f} ms: {ours_ms / bare_ms:.3f}")  # fmt: skip
    return {**ratios, "optim, a window of 4 over its parts": ours_ms / bare_ms}


def groups(leaves, repeat):
    """Print (b); return the ratios."""
    rng = np.random.default_rng(0)
    params = {f"layer{i:04d}": rng.normal(size=(16, 16)).astype(np.float32) for i in range(leaves)}
    grads = jax.tree.map(lambda p: jnp.asarray(p * 0.01), params)
    tx = optax.adamw(1e-3)

    def compiled(fn, *args):
        jax.clear_caches()
        spent = time.perf_counter()
        out = fn.lower(*args).compile()
        return out, time.perf_counter() - spent

    reference, state = make_optax(tx), tx.init(params)
    executable, base_compile = compiled(reference, params, state, grads)
    loop = Loop(params, state)
    subjects, compile_times = {"optax": lambda: loop.run(executable, grads)}, {}
    for count in (1, 10, 100):
        names = list(params)
        members = [{"params": names[i::count], "lr": 1e-3 * (i + 1), "weight_decay": 1e-4 * i} for i in range(count)]
        wrapper = OptimWrapper(AdamW(lr=1e-3).with_groups(members))
        state = wrapper.init(params)
        executable_of, compile_times[count] = compiled(make_update(wrapper), params, state, grads, wrapper.hyperparams)
        own = Loop(params, state)
        subjects[str(count)] = lambda own=own, fn=executable_of, w=wrapper: own.run(fn, grads, w.hyperparams)
    times = medians(subjects, repeat)
    print(f"(b) {leaves} leaves, optax.adamw: step {times['optax'] * 1e3:.1f} ms, compile {base_compile:.1f} s")
    one, one_compile = times["1"], compile_times.pop(1)
    ratios = {"optim, one group over optax": one / times["optax"]}
    print(f"(b) one group over optax: step {one / times['optax']:.3f}, compile {one_compile / base_compile:.2f}")
    for count, spent in compile_times.items():
        step = ratios[f"optim, {count} groups over one"] = times[str(count)] / one
        print(f"(b) {count} groups over one: step {step:.3f}, compile {spent / one_compile:.2f}")
    return ratios


def loss_scaling(size, repeat):
    """Print (c); return the ratio."""
    params = big_params(size)
    batch = examples(size)
    subjects = {}
    for name, wrapper in {
        "off": OptimWrapper(AdamW(lr=1e-3)),
        "on": AmpOptimWrapper(optimizer=AdamW(lr=1e-3), dtype="float32", loss_scale="dynamic"),
    }.items():

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, x, hyperparams, wrapper=wrapper):
            _, grads = wrapper.value_and_grad(loss)(params, state, x)
            return wrapper.apply_gradients(grads, state, params, hyperparams)

        loop, hyperparams = Loop(params, wrapper.init(params)), wrapper.hyperparams
        subjects[name] = lambda loop=loop, step=step, hp=hyperparams: loop.run(step, batch, hp)
    times = medians(subjects, repeat)
    on_ms, off_ms = times["on"] * 1e3, times["off"] * 1e3
    print(f"(c) loss scaling: {on_ms:.0f} ms, without {off_ms:.0f} ms: {on_ms / off_ms:.3f}")
    return {"optim, loss scaling over none": on_ms / off_ms}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tenth of the sizes, for a look")
    parser.add_argument("--json", help="where the ratios are written to")
    args = parser.parse_args()
    size = 2**21 if args.small else 20 * 2**20
    ratios = accumulation(size, repeat=7)
    ratios |= groups(leaves=100 if args.small else 1000, repeat=15)
    ratios |= loss_scaling(size, repeat=9)
    write_ratios(args.json, ratios)
