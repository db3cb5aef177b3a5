"""Count the collectives of an iteration, by strategy: operations and bytes, against the minimum.

Times on fake CPU devices are meaningless, so the compiled programs are read instead. The minimum for copies of the
parameters on every device is one all-reduce of the gradients an update, on the wire twice their size; nothing in an
iteration that only accumulates. The minimum for parameters divided over all devices is the same in every iteration: a
gather of the parameters and a reduce-scatter of the gradients.

    python benchmarks/devices.py [--devices 8] [--width 512] [--batch 16384]
"""

import argparse
import os
import tempfile


def strategies(devices):
    """Return the strategies to compare, by name."""
    half = dict(data=2, fsdp=devices // 2)
    tensor = [("up.kernel", (None, "tensor")), ("down.kernel", ("tensor", None))]
    return {
        f"Pjit, data {devices}": dict(type="Pjit"),
        f"Pjit, fsdp {devices}": dict(type="Pjit", mesh=dict(data=1, fsdp=devices), fsdp_min_size=2**10),
        f"Pjit, data 2, fsdp {devices // 2}": dict(type="Pjit", mesh=half, fsdp_min_size=2**10),
        f"Pjit, data {devices // 2}, tensor 2": dict(type="Pjit", mesh=dict(tensor=2), rules=tensor),
        f"DataParallel, data {devices}": dict(type="DataParallel"),
        f"DataParallel, data 2, fsdp {devices // 2}": dict(type="DataParallel", mesh=half, fsdp_min_size=2**10),
        f"DataParallel, data {devices // 2}, tensor 2": dict(type="DataParallel", mesh=dict(tensor=2), rules=tensor),
    }


def programs(parallel, work_dir, width, batch_size):
    """Return the compiled text of the accumulating and updating step of a two-layer regression, and the parameters."""
    import flax.linen as nn
    import jax
    import numpy as np

    from jengine.data import ArrayDataset
    from jengine.model import LinenModel, MeanSquaredError
    from jengine.runner import Runner

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(width, name="down")(nn.relu(nn.Dense(2 * width, name="up")(x)))

    data = dict(x=np.ones((batch_size, width), np.float32), y=np.ones((batch_size, width), np.float32))
    runner = Runner(
        model=LinenModel(Net(), MeanSquaredError(target="y"), inputs="x"),
        work_dir=work_dir,
        train_dataloader=dict(batch_size=batch_size, dataset=ArrayDataset(data), drop_last=True),
        train_cfg=dict(by_epoch=False, max_iters=2),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3), accumulative_counts=2, clip_grad=dict(max_norm=1.0)),
        default_hooks=dict(checkpoint=None, logger=None),
        parallel=parallel,
        log_level="ERROR",
    )
    state = runner.train()
    batch, hyperparams = runner.strategy.put_batch(data), runner.optim_wrapper.hyperparams
    texts = [
        runner.strategy.compile_train_step(step.__wrapped__).lower(state, batch, hyperparams).compile().as_text()
        for step in (runner.programs.accumulate, runner.programs.update)
    ]
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((state.params, state.opt_state)))
    return texts, sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)), held


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16384)
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"

    from collections import Counter

    from jengine.logging import format_table
    from jengine.sharding import collectives, traffic

    rows = []
    for name, parallel in strategies(args.devices).items():
        with tempfile.TemporaryDirectory() as work_dir:
            texts, parameters, held = programs(parallel, work_dir, args.width, args.batch)
        for iteration, text in zip(("accumulates", "updates"), texts, strict=True):
            found = collectives(text)
            arrays = Counter()
            for one in found:
                arrays[one.kind if one.size > 4 * one.arrays else "scalar"] += one.arrays
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(arrays.items()))
            sent = traffic(found)
            rows.append(
                [name, iteration, kinds or "nothing", f"{sent / 2**20:.2f}", f"{sent / (2 * parameters):.2f}",
                 f"{held / 2**20:.2f}"]
            )  # fmt: skip
    columns = ["strategy", "iteration", "arrays exchanged", "MiB sent", "of 2 x parameters", "MiB of state per device"]
    title = f"{parameters / 2**20:.2f} MiB of parameters, batch {args.batch}, {args.devices} devices"
    print(format_table(columns, rows, title=title))


if __name__ == "__main__":
    main()
