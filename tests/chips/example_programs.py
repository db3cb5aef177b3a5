"""Give the programs of the examples to XLA's compilers for chips.

As a config, `example_programs.py:gan` has the arguments of the Runner that an example builds first. As a script,
`python example_programs.py own_loop v5e:2x2` compiles the step of an example with a loop of its own, and prints what
the program takes on a chip as JSON.
"""

import importlib.util
import inspect
import json
import pathlib
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jengine import Runner
from jengine.config import resolve
from jengine.config.errors import ArgumentError
from jengine.extras.networks import attend
from jengine.extras.plan.program_costs import measure_program
from jengine.extras.plan.topologies import parse_topology
from jengine.parallel import build_mesh

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


class Reached(Exception):
    """End an example at the point of interest, with the arguments of the call."""


class StoppingRunner(Runner):
    """End an example where it builds a Runner."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise Reached(inspect.signature(Runner).bind(*args, **options).arguments)

    @classmethod
    def from_cfg(cls, cfg: Any) -> Runner:
        """End the example with the config."""
        raise Reached(resolve(cfg))


class JaxOnChips:
    """Be `jax` for an example: the devices are chips, and the example ends at the first call of its step.

    The step is the jitted function that donates arguments. What the example puts on chips are only shapes.

    Args:
      devices: of a topology.
    """

    def __init__(self, devices: list[Any]) -> None:
        self._devices = devices

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def devices(self) -> list[Any]:
        """Return the chips."""
        return self._devices

    def local_device_count(self) -> int:
        """Return the number of chips."""
        return len(self._devices)

    def make_mesh(self, *args: Any, **options: Any) -> jax.sharding.Mesh:
        """Return a mesh of the chips."""
        return jax.make_mesh(*args, **options, devices=self._devices)

    def device_put(self, tree: Any, sharding: Any) -> Any:
        """Return the shapes of arrays on chips."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    def jit(self, fun: Any, **options: Any) -> Any:
        """Compile for chips what donates its arguments, and other functions for this machine."""
        jitted = jax.jit(fun, **options)
        if "donate_argnums" not in options:
            return jitted
        return self._stop_at(jitted, options["donate_argnums"], SingleDeviceSharding(self._devices[0]), copies=1)

    def pmap(self, fun: Any, **options: Any) -> Any:
        """Compile for all chips; the arguments have a leading axis with a copy for each."""
        pmapped = jax.pmap(fun, **options, devices=self._devices)
        return self._stop_at(pmapped, options["donate_argnums"], None, copies=len(self._devices))

    def _stop_at(self, jitted: Any, donated: int | tuple[int, ...], sharding: Any, copies: int) -> Any:
        """Return a function that lowers the program; arrays that the example did not place get the sharding."""
        donated = (donated,) if isinstance(donated, int) else donated

        def stop(*args: Any) -> None:
            args = tuple(
                jax.tree.map(lambda x: self.device_put(x, sharding) if isinstance(x, jax.Array) else x, arg)
                for arg in args
            )
            leaves = jax.tree.leaves([args[i] for i in donated])
            raise Reached(jitted.lower(*args), sum(x.size * x.dtype.itemsize for x in leaves) // copies)

        return stop


def get_config(name: str) -> dict[str, Any]:
    """Return an example's config, or the arguments of the Runner that it builds first; the second of finetune_timm is a config."""
    example = load_example(name)
    if hasattr(example, "get_config"):  # `main` trains it in processes of their own
        return example.get_config()
    example.Runner = StoppingRunner  # type: ignore[attr-defined]
    (arguments,) = run_until_reached(example)
    return dict(arguments)


def compile_step(name: str, chips: str) -> dict[str, Any]:
    """Compile the step of an example with a loop of its own."""
    topology = parse_topology(chips)
    example = load_example(name)
    example.jax = JaxOnChips(topology.devices())  # type: ignore[attr-defined]
    lowered, state_bytes = run_until_reached(example)
    plan = measure_program(lowered.compile(), {})
    return {**plan, "fits": plan["total_memory"] <= topology.chip.memory, "state_bytes": state_bytes}


def load_example(name: str) -> types.ModuleType:
    """Import an example, once in a process: it registers classes."""
    path = str(EXAMPLES / f"{name}.py")
    if getattr(sys.modules.get(name), "__file__", "") == path:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    sys.modules[name] = example
    return example


def run_until_reached(example: types.ModuleType) -> tuple[Any, ...]:
    """Run an example, and return the arguments of the call at which it ends."""
    try:
        example.main()
    except Reached as reached:
        return reached.args
    raise ArgumentError(f"`main` of {example.__name__} must build a Runner, or call a step that donates its arguments")


def compile_attention(chips: str) -> dict[str, int]:
    """Count the calls of kernels in the gradients of attention on all chips, and the bytes of its buffers."""
    topology = parse_topology(chips)
    mesh = build_mesh(dict(data=1, fsdp=-1), topology.devices())
    sharding = jax.NamedSharding(mesh, jax.P("fsdp"))
    query, key = (
        jax.ShapeDtypeStruct((topology.size, 2048, heads, 64), jnp.bfloat16, sharding=sharding) for heads in (8, 2)
    )

    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return attend(query, key, value, window=512).astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(query, key, key).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return {"kernels": text.count('custom_call_target="tpu_custom_call"'), "temporary": memory.temp_size_in_bytes}


if __name__ == "__main__":
    result = compile_attention(sys.argv[2]) if sys.argv[1] == "attention" else compile_step(*sys.argv[1:])
    print(json.dumps(result))
