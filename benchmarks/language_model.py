"""Compile the transformer of configs/lm.py for TPUs, beside a step by hand and MaxText's.

    make test-chips ARGS=--collect-only       # installs the compilers, once
    .venv-chips/bin/python -m benchmarks.language_model [--tokens 2x2048 1x8192]

`lm.py:1b` on 16 v5e chips with fsdp=16, bfloat16 and full rematerialization. No chip is needed:
cycles are XLA's estimate, of everything but Pallas kernels, which it does not estimate.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

TOPOLOGY = "v5e:4x4"
MESH = dict(data=1, fsdp=16, tensor=1)

# MaxText at commit e591f30cb, of its `train_compile` with jax 0.10.2, libtpu 0.0.42.1, Python 3.12
# and compile_topology=v5e-16 base_emb_dim=2048 base_num_query_heads=16 base_num_kv_heads=16
# base_mlp_dim=6144 base_num_decoder_layers=16 head_dim=128 vocab_size=32768 decoder_block=llama2
# dtype=bfloat16 weight_dtype=float32 remat_policy=full opt_type=adamw attention=flash
# ici_fsdp_parallelism=16, analysed as below.
MAXTEXT = {
    "2x2048": {
        "mcycles": 495.1,
        "kernels": 64,
        "arguments": 720.9,
        "temporary": 1836.0,
        "all-gather": 1408.2,
        "collective-permute": 4080.0,
        "all-to-all": 32.0,
        "sent": 5520.5,
    },
    "1x8192": {
        "mcycles": 1118.4,
        "kernels": 64,
        "arguments": 721.0,
        "temporary": 3263.2,
        "all-gather": 1408.5,
        "collective-permute": 4080.0,
        "all-to-all": 64.0,
        "sent": 5552.8,
    },
}


def make_update(module: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
    """Return `update(state, batch) -> (state, loss)` in bfloat16 with plain optax, not yet
    jitted.
    """
    import jax
    import jax.numpy as jnp
    import optax

    def update(state, batch):
        def compute_loss(params):
            params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
            logits = module.apply({"params": params}, batch["tokens"]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        loss, gradients = jax.value_and_grad(compute_loss)(state["params"])
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return dict(params=optax.apply_updates(state["params"], updates), opt_state=opt_state), loss

    return update


def compile_by_hand(batch: int, length: int) -> dict[str, Any]:
    """Compile a step of the same module without the engine, and return what it costs."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    from configs.lm import MLP_RULES, RULES, SIZES
    from jengine.extras.networks import TransformerLM
    from jengine.extras.plan.program_costs import measure_program
    from jengine.extras.plan.topologies import parse_topology

    module = TransformerLM(**SIZES["1b"])
    devices = parse_topology(TOPOLOGY).devices()
    mesh = jax.sharding.Mesh(np.array(devices).reshape(tuple(MESH.values())), tuple(MESH))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 2000, 100_000)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1)
    )

    def create():
        params = module.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))["params"]
        return dict(params=params, opt_state=optimizer.init(params))

    update = make_update(module, optimizer)

    def place(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        specs = [spec for rule, spec in [*RULES, *MLP_RULES] if name.endswith(rule)]
        # The rules name axes of other meshes too.
        axes = [
            (axis,) if isinstance(axis, str) else axis or () for axis in (specs[0] if specs else ())
        ]
        sharding = NamedSharding(
            mesh, PartitionSpec(*(tuple(name for name in axis if name in MESH) for axis in axes))
        )
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    with jax.set_mesh(mesh):
        state = jax.tree_util.tree_map_with_path(place, jax.eval_shape(create))
        rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        tokens = jax.ShapeDtypeStruct((batch * len(devices), length), jnp.int32, sharding=rows)
        out_shardings = (
            jax.tree.map(lambda x: x.sharding, state),
            NamedSharding(mesh, PartitionSpec()),
        )
        traced = jax.jit(update, donate_argnums=0, out_shardings=out_shardings).trace(
            state, dict(tokens=tokens, targets=tokens)
        )
        start = time.monotonic()
        compiled = traced.lower().compile()
    return {**measure_program(compiled, {}), "compile_seconds": time.monotonic() - start}


def compile_by_engine(batch: int, length: int) -> dict[str, Any]:
    """Compile the step of `configs/lm.py:1b` as `jengine plan` does, and return what it costs."""
    from jengine.extras.plan.plan_process import compile_candidates
    from jengine.extras.plan.topologies import parse_topology

    topology = parse_topology(TOPOLOGY)
    hosts = len({device.process_index for device in topology.devices()})
    rows = batch * MESH["fsdp"] // hosts
    overrides = [
        f"--config.train_dataloader.batch_size={rows}",
        f"--config.train_dataloader.dataset.length={length}",
    ]
    candidate = dict(mesh=MESH, overrides=overrides)
    (result,) = compile_candidates(
        "configs/lm.py:1b", [], topology, [candidate], training_only=True
    )
    if "error" in result:
        raise RuntimeError(result["error"] + result["traceback"])
    return result["plan"]["programs"]["update"]


def summarize(costs: dict[str, Any]) -> dict[str, float]:
    """Return millions of cycles, kernels, and MiB of arguments, temporaries and what a chip
    sends.
    """
    memory = dict(costs["memory"])
    temporary = memory.pop("temporary buffers")
    other = ("program", "outputs that reuse no input")
    arguments = sum(size for kind, size in memory.items() if kind not in other)
    return dict(
        mcycles=costs["cycles"] / 1e6,
        kernels=sum(costs["kernels"].values()),
        arguments=arguments / 2**20,
        temporary=temporary / 2**20,
        **{
            row["kind"]: row["traffic"] / 2**20
            for row in costs["collectives"]
            if row["size"] > 2**20
        },
        sent=sum(row["traffic"] for row in costs["collectives"]) / 2**20,
        seconds=costs["compile_seconds"],
    )


def main() -> None:
    """Print a table for each number of tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", nargs="+", default=list(MAXTEXT), help="examples and tokens of a chip"
    )
    parser.add_argument("--compile", choices=("hand", "engine"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    for tokens in args.tokens:
        sizes = [int(size) for size in tokens.split("x")]
        if args.compile:
            costs = compile_by_hand(*sizes) if args.compile == "hand" else compile_by_engine(*sizes)
            print(json.dumps(summarize(costs)))
            continue
        rows = {"MaxText": MAXTEXT.get(tokens, {})}
        for who in ("hand", "engine"):
            # The environment of the compilers is set before JAX is imported.
            from jengine.extras.plan.topologies import parse_topology

            command = [
                sys.executable,
                "-m",
                "benchmarks.language_model",
                "--compile",
                who,
                "--tokens",
                tokens,
            ]
            environment = {**os.environ, **parse_topology(TOPOLOGY).environment}
            output = subprocess.run(
                command, check=True, capture_output=True, text=True, env=environment
            ).stdout
            rows[who] = json.loads(output.splitlines()[-1])
        columns = list(dict.fromkeys(name for row in rows.values() for name in row))
        print(
            f"\n{tokens} tokens on each of 16 chips\n| | {' | '.join(columns)} "
            f"|\n|---{'|---' * len(columns)}|"
        )
        for who, row in rows.items():
            print(
                f"| {who} | {' | '.join(f'{row.get(name, 0):.1f}' for name in columns)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
