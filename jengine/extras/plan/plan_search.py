"""Search for the mesh, rematerialization and batch size with which a config trains fastest on
given chips.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jengine.config.containers import iter_nodes
from jengine.config.errors import ConfigError
from jengine.extras.plan.plan_process import PlanError
from jengine.extras.plan.topologies import Topology
from jengine.parallel.mesh import MeshSizes

Plan = dict[str, Any]

_TENSOR_SIZES = (1, 2, 4, 8)
_CONTEXT_SIZES = (2, 4, 8, 16)
# the number of plans whose batch size is increased, with and without rematerialization
_REFINED = 2
_DOUBLINGS = 3
_BATCH_DOUBLINGS = 12  # of the search for the largest batch
_BISECTIONS = 2  # between a batch that fits and twice as many examples
_GAIN = 1.01  # of examples per second, for a larger batch to be worth another


class Candidate(NamedTuple):
    """Values that a search varies."""

    mesh: MeshSizes
    remat: bool | None  # None for a model without the option
    batch_size: int  # of one process, or of all with `global_batch_size`


Compile = Callable[[Sequence[Candidate]], Sequence[Plan]]


class Space(NamedTuple):
    """Values to try."""

    meshes: Sequence[MeshSizes]  # number of devices along each axis, and number of slices
    remat_paths: list[str]  # dotted paths of the model's options `remat`
    batch_size: int  # in the config
    has_parallel: bool  # whether the config has the entry `parallel`
    batch_key: str = "batch_size"  # the dataloader's setting, which may be `global_batch_size`

    def overrides(self, candidate: Candidate) -> list[str]:
        """Return the arguments that set a candidate's values, except the mesh."""
        values = [f"--config.{path}={candidate.remat}" for path in self.remat_paths]
        return [*values, f"--config.train_dataloader.{self.batch_key}={candidate.batch_size}"]

    def config_lines(self, candidate: Candidate) -> list[str]:
        """Return the lines for a config file that set a candidate's values."""
        mesh = f"dict({', '.join(f'{axis}={size}' for axis, size in candidate.mesh.items())})"
        new = f'config.parallel = dict(type="Pjit", mesh={mesh})'
        parallel = f"config.parallel.mesh = {mesh}" if self.has_parallel else new
        remat = [f"config.{path} = {candidate.remat}" for path in self.remat_paths]
        return [
            parallel,
            *remat,
            f"config.train_dataloader.{self.batch_key} = {candidate.batch_size}",
        ]


def build_space(cfg: Mapping[str, Any], topology: Topology, mesh: MeshSizes | None) -> Space:
    """Return the values to try for a resolved config: only `mesh`, or several meshes for None."""
    parallel = cfg.get("parallel") or {}
    if mesh is None and parallel.get("batch_axes") is not None:
        raise ConfigError(
            "--search tries meshes of data, fsdp, tensor and context, so `parallel.batch_axes` "
            f"must be left out, got {parallel['batch_axes']}; or give the mesh with --mesh"
        )
    # Rules may be nested in any form; without one that names an axis, its sizes would only divide
    # the batch less.
    rules = repr((parallel.get("rules"), parallel.get("logical_axes")))
    tried = iterate_meshes(topology.size, "tensor" in rules, topology.slices, "context" in rules)
    meshes = [mesh] if mesh is not None else list(tried)
    nodes = iter_nodes(cfg["model"], "model")
    remat_paths = [
        path for path, value in nodes if path.endswith(".remat") and isinstance(value, bool)
    ]
    return _make_space(cfg, meshes, remat_paths)


def batch_space(cfg: Mapping[str, Any], topology: Topology, mesh: MeshSizes | None) -> Space:
    """Return the space in which only the batch size varies: on `mesh`, or that of the config, or
    with `data` alone.
    """
    parallel = cfg.get("parallel") or {}
    mesh = (
        mesh or parallel.get("mesh") or next(iterate_meshes(topology.size, False, topology.slices))
    )
    return _make_space(cfg, [mesh], [])


def _make_space(
    cfg: Mapping[str, Any], meshes: Sequence[MeshSizes], remat_paths: list[str]
) -> Space:
    loader = cfg["train_dataloader"]
    key = "global_batch_size" if "global_batch_size" in loader else "batch_size"
    return Space(meshes, remat_paths, loader.get(key, 1), "parallel" in cfg, key)


def iterate_meshes(
    size: int, has_tensor: bool, slices: int = 1, has_context: bool = False
) -> Iterator[MeshSizes]:
    """Yield meshes with `size` devices: parameters replicated, divided over all devices in a slice,
    and over some.

    >>> [mesh["fsdp"] for mesh in iterate_meshes(16, has_tensor=False)]
    [1, 4, 16]

    Sizes along `tensor` and `context` are tried if the config has a rule for them; of the axes,
    only `data` crosses slices. `context` is for fewer examples than chips, so it leaves the others
    to `fsdp`.
    """

    def with_slices(mesh: dict[str, int]) -> MeshSizes:
        return mesh if slices == 1 else {**mesh, "slices": {"data": slices}}

    for tensor in _TENSOR_SIZES if has_tensor else (1,):
        if size // slices % tensor:
            continue
        rest = size // slices // tensor
        # between the extremes, a mesh as square as the number of devices allows
        middle = max(n for n in range(1, math.isqrt(rest) + 1) if rest % n == 0)
        for fsdp in dict.fromkeys((1, middle, rest)):
            yield with_slices({"data": slices * rest // fsdp, "fsdp": fsdp, "tensor": tensor})
    for context in _CONTEXT_SIZES if has_context else ():
        if size // slices % context == 0:
            yield with_slices(
                {"data": slices, "fsdp": size // slices // context, "context": context, "tensor": 1}
            )


def search(space: Space, compile_all: Compile, report: Callable[[str], None]) -> list[Plan]:
    """Return a plan for each candidate that was tried, the fastest that fits first.

    All meshes are tried with and without rematerialization and the config's batch size: a half, a
    quarter or an eighth of it if nothing fits. Meshes that the config does not allow are left out.
    Then the batch size in the best plans is doubled as long as it fits and is faster.

    Each result of `compile_all` has `candidate`, `fits`, and `programs` unless it failed; `report`
    gets progress lines.
    """
    remat = (False, True) if space.remat_paths else (None,)
    found: list[Plan] = []
    size = space.batch_size
    for _ in range(_DOUBLINGS + 1):
        candidates = [Candidate(mesh, option, size) for mesh in space.meshes for option in remat]
        report(f"compiling {len(candidates)} candidates with batch_size {size}")
        found += compile_all(candidates)
        if not any("programs" in plan for plan in found):
            raise PlanError(f"no candidate can be compiled: {found[0]['error']}")
        if refused := [
            plan for plan in found if plan.get("error", "").startswith(ConfigError.__name__)
        ]:
            found = [plan for plan in found if not any(plan is each for each in refused)]
            meshes = {str(plan["candidate"]["mesh"]) for plan in refused}
            space = space._replace(
                meshes=[mesh for mesh in space.meshes if str(mesh) not in meshes]
            )
            report(
                f"left out {len(meshes)} meshes that the config does not allow: "
                f"{refused[0]['reason']}"
            )
        if any(plan["fits"] for plan in found) or size == 1:
            break
        size //= 2  # nothing fits: the memory of activations is proportional to the batch size
    fitting = [plan for plan in rank(found) if plan["fits"]]
    # slower at first, rematerialization may be faster with the batch size for which it makes room
    best = [
        plan
        for option in remat
        for plan in [p for p in fitting if p["candidate"]["remat"] is option][:_REFINED]
    ]
    for doubled in range(1, 1 + (_DOUBLINGS if size == space.batch_size else 0)):
        if not best:
            break
        candidates = [
            Candidate(**{**plan["candidate"], "batch_size": size << doubled}) for plan in best
        ]
        report(f"compiling {len(candidates)} candidates with batch_size {size << doubled}")
        found += (larger := compile_all(candidates))
        rank(found)
        best = [
            new
            for old, new in zip(best, larger, strict=True)
            if new["fits"] and new["examples_per_second"] > _GAIN * old["examples_per_second"]
        ]
    ranked = rank(found)
    for plan in ranked:
        plan["config_lines"] = space.config_lines(Candidate(**plan["candidate"]))
    return ranked


def search_batch(space: Space, compile_all: Compile, report: Callable[[str], None]) -> list[Plan]:
    """Return a plan for each batch size that was tried, the largest that fits first.

    Arguments as for `search`.

    The config's size is doubled until it does not fit, or halved until it does; two sizes in
    between follow.
    """
    found: dict[int, Plan] = {}

    def fits(size: int) -> bool:
        report(f"compiling batch_size {size}")
        (found[size],) = compile_all([Candidate(space.meshes[0], None, size)])
        return found[size]["fits"]

    size = space.batch_size
    # Doubling finds the range in few compilations, which take tens of seconds each; bisection then
    # refines it.
    if fits(size):
        while len(found) <= _BATCH_DOUBLINGS and fits(2 * size):
            size *= 2
    else:
        while size > 1 and not fits(size // 2):
            size //= 2
        size //= 2
    low = size
    high = 2 * size
    for _ in range(_BISECTIONS if high in found and not found[high]["fits"] else 0):
        if high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
    # Not memory, then: the model itself cannot be compiled, and no batch size would help.
    if not any("programs" in plan for plan in found.values()):
        raise PlanError(f"no batch size can be compiled: {found[space.batch_size]['error']}")
    ranked = sorted(
        rank(list(found.values())),
        key=lambda plan: (not plan["fits"], -plan["candidate"]["batch_size"]),
    )
    for plan in ranked:
        plan["config_lines"] = space.config_lines(Candidate(**plan["candidate"]))
    return ranked


def rank(plans: Sequence[Plan]) -> list[Plan]:
    """Add the estimated step time and examples per second to each plan, and sort: the fastest that
    fits first.

    The compiler's estimates are used if there is one for every program in all plans, else the lower
    bounds.
    """
    programs = [
        program
        for plan in plans
        for program in plan.get("programs", {}).values()
        if "seconds" in program
    ]
    # One kind of estimate for all: the compiler's and the bound must not be ranked against each
    # other.
    name = (
        "seconds" if all(program["compiler_seconds"] for program in programs) else "bound_seconds"
    )
    for plan in plans:
        if plan["fits"]:
            counts = plan["accumulative_counts"]
            times = {key: p[name] for key, p in plan["programs"].items()}
            # The mean over an accumulation window, as its iterations cost differently.
            step = (times["update"] + (counts - 1) * times.get("accumulate", 0.0)) / counts
            step += sum(
                times[key] / p["every"] for key, p in plan["programs"].items() if "every" in p
            )
            plan.update(step_seconds=step, examples_per_second=plan["examples_per_step"] / step)
    return sorted(plans, key=lambda plan: (not plan["fits"], -plan.get("examples_per_second", 0.0)))


def describe_result(candidate: Candidate, result: Mapping[str, Any]) -> Plan:
    """Return the plan in a result of `compile_candidates`, with the candidate, and the reason
    why it does not fit.
    """
    plan = result.get("plan") or {"fits": False, "error": result["error"]}
    reason = plan.get("error", "" if plan["fits"] else "more memory than a chip has").partition(
        "\n"
    )[0]
    return {"candidate": candidate._asdict(), "reason": reason, **plan}
