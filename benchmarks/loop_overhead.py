"""What the Runner costs per iteration: its default hooks against a loop written by hand, on the same tiny step.

Both loops run in one process, in turns, over the same host batches and through the same compiled step, and both look
at the loss every ten iterations; the medians over the rounds are compared.

    python benchmarks/loop_overhead.py [--iters 1000] [--rounds 9]
"""

import argparse
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from jengine import Runner
from jengine.model import FunctionalModel
from jengine.train import build_train_step, create_train_state

WIDTH, BATCH, LOG_EVERY = 32, 32, 10


def make_model():
    """A perceptron with one hidden layer: a step of some tens of microseconds."""

    def init(rng):
        first, second = jax.random.split(rng)
        return {"w": jax.random.normal(first, (WIDTH, WIDTH)) / 6, "v": jax.random.normal(second, (WIDTH, 1)) / 6}

    def predict(params, batch):
        return jnp.tanh(batch["x"] @ params["w"]) @ params["v"]

    def loss(params, batch):
        return jnp.square(predict(params, batch)[:, 0] - batch["y"])

    return FunctionalModel(init=init, loss=loss, predict=predict)


def make_batches():
    """Host batches, enough that none is hot in a cache by chance."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, BATCH, WIDTH), np.float32)
    return [{"x": x[i], "y": x[i].sum(axis=1)} for i in range(len(x))]


def make_runner(batches, iters, work_dir):
    """A Runner with all default hooks that logs every ten iterations and saves at the end."""
    return Runner(
        make_model(),
        work_dir,
        train_dataloader=batches,
        train_cfg=dict(by_epoch=False, max_iters=iters),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.01, momentum=0.9)),
        param_scheduler=dict(type="CosineAnnealingLR", by_epoch=False, end=iters),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=LOG_EVERY),
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=-1, save_last=False),
        ),
        log_level="WARNING",
    )


def by_hand(step, state, batches, iters, hyperparams, put):
    """A careful loop: the next batch is on its way, at most two steps are in flight, the loss is read every tenth."""
    ready = put(batches[0])
    in_flight, losses, fetches = [], [], 0
    start = time.perf_counter()
    for i in range(iters):
        batch, ready = ready, put(batches[(i + 1) % len(batches)])
        if len(in_flight) == 2:
            jax.block_until_ready(in_flight.pop(0))
        state, outputs = step(state, batch, hyperparams)
        in_flight.append(outputs["loss"])
        losses.append(outputs["loss"])
        if (i + 1) % LOG_EVERY == 0:
            np.mean(jax.device_get(losses))
            losses.clear()
            fetches += 1
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / iters * 1e6, fetches, state


def with_runner(runner, iters):
    """The same through the Runner's loop, from its first iteration to its last."""
    runner.train_loop.iter = 0
    before = runner.message_hub.fetches
    for scheduler in runner.param_schedulers:
        scheduler.load_state_dict({**scheduler.state_dict(), "global_step": 0, "last_step": 0})
    start = time.perf_counter()
    runner.train_loop.run()
    jax.block_until_ready(runner.state)
    return (time.perf_counter() - start) / iters * 1e6, runner.message_hub.fetches - before


def main():
    """Prints both times, their difference, and the fetches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    batches = make_batches()
    with tempfile.TemporaryDirectory() as work_dir:
        runner = make_runner(batches, args.iters, work_dir)
        runner.train()  # compiles
        wrapper, model = runner.optim_wrapper, runner.model
        step = jax.jit(build_train_step(model, wrapper), donate_argnums=0)
        params, model_state = model.init(jax.random.key(0), batches[0])
        state = create_train_state(params, model_state, wrapper, rng=jax.random.key(1))
        fixed = (wrapper.hyperparams, runner.strategy.put_batch)
        _, _, state = by_hand(step, state, batches, 20, *fixed)
        hand, engine = [], []
        for _ in range(args.rounds):
            took, hand_fetches, state = by_hand(step, state, batches, args.iters, *fixed)
            hand.append(took)
            took, engine_fetches = with_runner(runner, args.iters)
            engine.append(took)
    by, ours = statistics.median(hand), statistics.median(engine)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {args.iters} iterations, {args.rounds} rounds")
    print(f"by hand      {by:8.1f} us/iteration, {hand_fetches} fetches")
    print(f"Runner       {ours:8.1f} us/iteration, {engine_fetches} fetches")
    print(f"difference   {ours - by:8.1f} us/iteration, ratio {ours / by:.2f}")


if __name__ == "__main__":
    main()
