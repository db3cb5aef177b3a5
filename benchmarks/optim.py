"""Measure optimizer wrappers, as ratios of medians over interleaved repetitions.

    python -m benchmarks.optim [--small] [--json FILE]

(a) accumulation over 4 iterations, AdamW: the optimizer's part relative to optax.MultiSteps
(target: at most 1/5), and
    complete windows relative to 4 gradient computations and one update without a wrapper (target:
    at most 1.05)
(b) a tree of 1,000 leaves: one group relative to optax's chain (target: at most 1.1); 10 and 100
groups relative to
    one, for a step (target: at most 1.1) and its compile time (target: at most 1.5)
(c) loss scaling relative to no loss scaling (target: at most 1.05)
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


def time_call(fn, *args):
    """Return the wall time of one call in seconds, including execution on the device, and the
    results.
    """
    start = time.perf_counter()
    out = jax.block_until_ready(fn(*args))
    return time.perf_counter() - start, out


def measure_medians(subjects, repeat):
    """Return the median seconds of each subject, `name -> fn()`; calls are interleaved so that
    noise affects all.
    """
    times = {name: [] for name in subjects}
    for _ in range(repeat):
        for name, fn in subjects.items():
            times[name].append(fn())
    return {name: statistics.median(values) for name, values in times.items()}


class Loop:
    """Hold state that is donated in every step."""

    def __init__(self, *state):
        self.state = jax.tree.map(jnp.array, state)

    def run(self, fn, *args):
        """Run `state = fn(*state, *args)`; return its time in seconds."""
        spent, self.state = time_call(fn, *self.state, *args)
        return spent


def compile_wrapper_update(wrapper):
    """Return the compiled update of a wrapper."""

    def update(params, state, grads, hyperparams):
        return wrapper.apply_gradients(grads, state, params, hyperparams)

    return jax.jit(update, donate_argnums=(0, 1))


def compile_optax_update(tx):
    """Return the compiled update of an optax chain."""

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(update, donate_argnums=(0, 1))


def make_params(size):
    """Return eight matrices with `size` parameters in total."""
    rng = np.random.default_rng(0)
    return {
        f"layer{i}": rng.normal(size=(size // 8 // 1024, 1024)).astype(np.float32) for i in range(8)
    }


def make_batch(size):
    """Return a batch of 1,024 examples, so that gradients take several times as long as an
    update, as in training.
    """
    return jnp.asarray(
        np.random.default_rng(1).normal(size=(1024, size // 8 // 1024)).astype(np.float32)
    )


def loss(params, x):
    """Return a sum over all matrices, so that all have gradients."""
    return sum(jnp.mean(jnp.tanh(x @ w) ** 2) for w in params.values())


def measure_accumulation(size, repeat):
    """Print (a); return the ratios."""
    params = make_params(size)
    wrapper = OptimWrapper(AdamW(lr=1e-3), accumulative_counts=4)
    wrapper.initialize_count_status(0, -1)
    hyperparams = wrapper.hyperparams
    grads = jax.tree.map(lambda p: jnp.asarray(p * 0.01), params)
    multi = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=4)
    update = compile_wrapper_update(wrapper)
    accumulate = jax.jit(lambda p, s, g: (p, wrapper.accumulate(g, s)), donate_argnums=(0, 1))
    multi_step = compile_optax_update(multi)
    adamw = compile_optax_update(optax.adamw(1e-3))
    ours = Loop(params, wrapper.init(params))
    theirs = Loop(params, multi.init(params))
    subjects = {
        "jengine": lambda: (
            sum(ours.run(accumulate, grads) for _ in range(3))
            + ours.run(update, grads, hyperparams)
        ),
        "MultiSteps": lambda: sum(theirs.run(multi_step, grads) for _ in range(4)),
    }
    times = measure_medians(subjects, repeat)
    ours_ms = times["jengine"] * 1e3
    multi_ms = times["MultiSteps"] * 1e3
    print(
        f"(a) {size / 1e6:.0f} M parameters, optimizer part of 4 iterations: {ours_ms:.0f} ms, "
        f"MultiSteps {multi_ms:.0f} ms: {multi_ms / ours_ms:.2f} times faster"
    )
    ratios = {"optim, accumulation over MultiSteps": ours_ms / multi_ms}

    batch = make_batch(size)
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
    ours = Loop(params, wrapper.init(params))
    bare = Loop(params, optax.adamw(1e-3).init(params))

    def run_bare_window():
        total = 0.0
        for _ in range(4):
            spent, grads = time_call(bare_grads, bare.state[0], batch)
            total += spent
        return total + bare.run(adamw, grads)

    def run_window():
        return sum(ours.run(micro_step, batch) for _ in range(3)) + ours.run(
            last_step, batch, hyperparams
        )

    times = measure_medians({"jengine": run_window, "bare": run_bare_window}, repeat)
    ours_ms = times["jengine"] * 1e3
    bare_ms = times["bare"] * 1e3
    print(
        f"(a) a window of 4 iterations: {ours_ms:.0f} ms, "
        f"4 gradients and an update {bare_ms:.0f} ms: {ours_ms / bare_ms:.3f}"
    )
    return {**ratios, "optim, a window of 4 over its parts": ours_ms / bare_ms}


def measure_groups(leaves, repeat):
    """Print (b); return the ratios."""
    rng = np.random.default_rng(0)
    params = {f"layer{i:04d}": rng.normal(size=(16, 16)).astype(np.float32) for i in range(leaves)}
    grads = jax.tree.map(lambda p: jnp.asarray(p * 0.01), params)
    tx = optax.adamw(1e-3)

    def time_compile(fn, *args):
        jax.clear_caches()
        start = time.perf_counter()
        executable = fn.lower(*args).compile()
        return executable, time.perf_counter() - start

    reference = compile_optax_update(tx)
    state = tx.init(params)
    executable, base_compile = time_compile(reference, params, state, grads)
    loop = Loop(params, state)
    subjects = {"optax": lambda: loop.run(executable, grads)}
    compile_times = {}
    for count in (1, 10, 100):
        names = list(params)
        members = [
            {"params": names[i::count], "lr": 1e-3 * (i + 1), "weight_decay": 1e-4 * i}
            for i in range(count)
        ]
        wrapper = OptimWrapper(AdamW(lr=1e-3).with_groups(members))
        state = wrapper.init(params)
        executable_of, compile_times[count] = time_compile(
            compile_wrapper_update(wrapper), params, state, grads, wrapper.hyperparams
        )
        own = Loop(params, state)
        subjects[str(count)] = lambda own=own, fn=executable_of, w=wrapper: own.run(
            fn, grads, w.hyperparams
        )
    times = measure_medians(subjects, repeat)
    print(
        f"(b) {leaves} leaves, optax.adamw: step {times['optax'] * 1e3:.1f} ms, compile "
        f"{base_compile:.1f} s"
    )
    one = times["1"]
    one_compile = compile_times.pop(1)
    ratios = {"optim, one group over optax": one / times["optax"]}
    print(
        f"(b) one group over optax: step {one / times['optax']:.3f}, compile "
        f"{one_compile / base_compile:.2f}"
    )
    for count, spent in compile_times.items():
        step = ratios[f"optim, {count} groups over one"] = times[str(count)] / one
        print(f"(b) {count} groups over one: step {step:.3f}, compile {spent / one_compile:.2f}")
    return ratios


def measure_loss_scaling(size, repeat):
    """Print (c); return the ratio."""
    params = make_params(size)
    batch = make_batch(size)
    subjects = {}
    for name, wrapper in {
        "off": OptimWrapper(AdamW(lr=1e-3)),
        "on": AmpOptimWrapper(optimizer=AdamW(lr=1e-3), dtype="float32", loss_scale="dynamic"),
    }.items():

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, x, hyperparams, wrapper=wrapper):
            _, grads = wrapper.value_and_grad(loss)(params, state, x)
            return wrapper.apply_gradients(grads, state, params, hyperparams)

        loop = Loop(params, wrapper.init(params))
        hyperparams = wrapper.hyperparams
        subjects[name] = lambda loop=loop, step=step, hp=hyperparams: loop.run(step, batch, hp)
    times = measure_medians(subjects, repeat)
    on_ms = times["on"] * 1e3
    off_ms = times["off"] * 1e3
    print(f"(c) loss scaling: {on_ms:.0f} ms, without {off_ms:.0f} ms: {on_ms / off_ms:.3f}")
    return {"optim, loss scaling over none": on_ms / off_ms}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--small", action="store_true", help="use a tenth of the sizes, for a quick run"
    )
    parser.add_argument("--json", help="the file to which the ratios are written")
    args = parser.parse_args()
    size = 2**21 if args.small else 20 * 2**20
    ratios = measure_accumulation(size, repeat=7)
    ratios |= measure_groups(leaves=100 if args.small else 1000, repeat=15)
    ratios |= measure_loss_scaling(size, repeat=9)
    write_ratios(args.json, ratios)
