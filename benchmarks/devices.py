"""Count the collectives per iteration and strategy, operations and bytes, and compare with the
minimum.

Times on simulated CPU devices are meaningless, so the collectives are counted in the compiled
programs. The minimum for replicated parameters is one all-reduce of the gradients per update, which
sends twice their size, and nothing in iterations that only accumulate. The minimum for fully
sharded parameters is the same in every iteration: an all-gather of the parameters and a
reduce-scatter of the gradients.

    python benchmarks/devices.py [--devices 8] [--width 512] [--batch 16384]
"""

import argparse
import os
import tempfile


def strategies(devices):
    """Return the `parallel` configs to compare, by name."""
    half = dict(data=2, fsdp=devices // 2)
    tensor = [("up.kernel", (None, "tensor")), ("down.kernel", ("tensor", None))]
    return {
        f"Pjit, data {devices}": dict(type="Pjit"),
        f"Pjit, fsdp {devices}": dict(
            type="Pjit", mesh=dict(data=1, fsdp=devices), fsdp_min_size=2**10
        ),
        f"Pjit, data 2, fsdp {devices // 2}": dict(type="Pjit", mesh=half, fsdp_min_size=2**10),
        f"Pjit, data {devices // 2}, tensor 2": dict(
            type="Pjit", mesh=dict(tensor=2), rules=tensor
        ),
        f"DataParallel, data {devices}": dict(type="DataParallel"),
        f"DataParallel, data 2, fsdp {devices // 2}": dict(
            type="DataParallel", mesh=half, fsdp_min_size=2**10
        ),
        f"DataParallel, data {devices // 2}, tensor 2": dict(
            type="DataParallel", mesh=dict(tensor=2), rules=tensor
        ),
    }


def compile_programs(parallel, work_dir, width, batch_size):
    """Compile a two-layer regression; return the HLO of the accumulating and the updating step, and
    two sizes in bytes.

    The sizes cover all parameters, and the state on one device.
    """
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

    data = dict(
        x=np.ones((batch_size, width), np.float32), y=np.ones((batch_size, width), np.float32)
    )
    runner = Runner(
        model=LinenModel(Net(), MeanSquaredError(target="y"), inputs="x"),
        work_dir=work_dir,
        train_dataloader=dict(batch_size=batch_size, dataset=ArrayDataset(data), drop_last=True),
        train_cfg=dict(by_epoch=False, max_iters=2),
        optim_wrapper=dict(
            optimizer=dict(type="AdamW", lr=1e-3),
            accumulative_counts=2,
            clip_grad=dict(max_norm=1.0),
        ),
        default_hooks=dict(checkpoint=None, logger=None),
        parallel=parallel,
        log_level="ERROR",
    )
    state = runner.train()
    batch = runner.strategy.put_batch(data)
    hyperparams = runner.optim_wrapper.hyperparams
    texts = [
        runner.strategy.compile_train_step(step.__wrapped__)
        .lower(state, batch, hyperparams)
        .compile()
        .as_text()
        for step in (runner.programs.accumulate, runner.programs.update)
    ]
    state_size = sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves((state.params, state.opt_state))
    )
    return texts, sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)), state_size


def main():
    """Compile all strategies and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16384)
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.devices}"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"

    from collections import Counter

    from jengine.extras.plan import find_collectives, traffic
    from jengine.logging import format_table

    rows = []
    for name, parallel in strategies(args.devices).items():
        with tempfile.TemporaryDirectory() as work_dir:
            texts, param_size, state_size = compile_programs(
                parallel, work_dir, args.width, args.batch
            )
        for iteration, text in zip(("accumulates", "updates"), texts, strict=True):
            operations = find_collectives(text)
            arrays = Counter()
            for operation in operations:
                arrays[operation.kind if operation.size > 4 * operation.arrays else "scalar"] += (
                    operation.arrays
                )
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(arrays.items()))
            sent = traffic(operations)
            rows.append(
                [
                    name,
                    iteration,
                    kinds or "nothing",
                    f"{sent / 2**20:.2f}",
                    f"{sent / (2 * param_size):.2f}",
                    f"{state_size / 2**20:.2f}",
                ]
            )
    columns = [
        "strategy",
        "iteration",
        "arrays exchanged",
        "MiB sent",
        "of 2 x parameters",
        "MiB of state per device",
    ]
    title = (
        f"{param_size / 2**20:.2f} MiB of parameters, batch {args.batch}, {args.devices} devices"
    )
    print(format_table(columns, rows, title=title))


if __name__ == "__main__":
    main()
