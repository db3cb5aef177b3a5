"""Test the search for a plan with a formula instead of the compiler."""

import pytest

from jengine.config.errors import ConfigError
from jengine.extras.plan.plan_report import format_search
from jengine.extras.plan.plan_search import (
    Candidate,
    batch_space,
    build_space,
    iterate_meshes,
    rank,
    search,
    search_batch,
)
from jengine.extras.plan.topologies import parse_topology

CFG = dict(
    model=dict(type="M", module=dict(type="N", remat=False)),
    train_dataloader=dict(batch_size=8),
    parallel=dict(type="Pjit", rules=[("up", (None, "tensor"))]),
)


def _compile(candidates, limit):
    """Return plans of a model that needs 10 bytes of memory per example, 5 with `remat`, which takes a third longer."""
    plans = []
    for each in candidates:
        memory = (5 if each.remat else 10) * each.batch_size
        seconds = (1.0 + 0.01 * each.batch_size) * (4 / 3 if each.remat else 1) * each.mesh["tensor"]
        program = dict(total_memory=memory, fits=memory <= limit, compiler_seconds=None, bound_seconds=seconds)
        plans.append(
            dict(
                candidate=each._asdict(), fits=memory <= limit, reason="" if memory <= limit else "memory",
                chip_memory=limit, examples_per_step=each.batch_size, accumulative_counts=1,
                programs={"update": {**program, "seconds": seconds}},
            )
        )  # fmt: skip
    return plans


def _search(cfg, topology, limit, mesh=None):
    space = build_space(cfg, parse_topology(topology), mesh)
    return search(space, lambda candidates: _compile(candidates, limit), report=lambda line: None)


def test_meshes_replicate_divide_and_do_both():
    assert [tuple(mesh.values()) for mesh in iterate_meshes(16, has_tensor=False)] == [
        (16, 1, 1),
        (4, 4, 1),
        (1, 16, 1),
    ]
    assert {mesh["tensor"] for mesh in iterate_meshes(4, has_tensor=True)} == {1, 2, 4}


def test_a_rule_for_context_adds_meshes_that_divide_the_tokens():
    cfg = {**CFG, "parallel": dict(type="Pjit", rules=[("up", (("context", "fsdp"), None))])}
    meshes = build_space(cfg, parse_topology("v5e:2x4", slices=2), None).meshes
    assert [(mesh["fsdp"], mesh["context"]) for mesh in meshes if "context" in mesh] == [(4, 2), (2, 4), (1, 8)]
    assert all(mesh["data"] == 2 and mesh["slices"] == {"data": 2} for mesh in meshes if "context" in mesh)


def test_the_batch_size_is_doubled_while_it_fits_and_is_faster():
    best = _search(CFG, "v5e:2x2", limit=400)[0]
    # 64 examples fit only with remat (320 bytes), at 29.3 a second; 32 fit without it, at 32 / 1.32 = 24.2
    assert best["candidate"]["remat"] is True
    assert best["candidate"]["batch_size"] == 64
    assert best["examples_per_second"] == pytest.approx(64 / (1.64 * 4 / 3))
    assert best["config_lines"] == [
        "config.parallel.mesh = dict(data=4, fsdp=1, tensor=1)",
        "config.model.module.remat = True",
        "config.train_dataloader.batch_size = 64",
    ]


def test_the_batch_size_is_halved_until_something_fits():
    plans = _search(CFG, "v5e:2x2", limit=25)
    assert (plans[0]["candidate"]["remat"], plans[0]["candidate"]["batch_size"]) == (True, 4)
    assert "more memory" not in format_search(plans[:1])
    assert "config.model.module.remat = True" in format_search(plans)


@pytest.mark.parametrize(
    ("limit", "best", "tried"),
    [
        (400, 40, {8, 16, 32, 64, 48, 40}),  # 10 bytes for each example: 40 fit
        (70, 7, {8, 4, 6, 7}),
        (5, None, {8, 4, 2, 1}),
    ],
)
def test_the_largest_batch_that_fits_is_found(limit, best, tried):
    space = batch_space(CFG, parse_topology("v5e:2x2"), None)
    plans = search_batch(space, lambda candidates: _compile(candidates, limit), report=lambda line: None)
    assert {plan["candidate"]["batch_size"] for plan in plans} == tried
    assert plans[0]["fits"] == (best is not None)
    if best is not None:
        assert plans[0]["config_lines"] == [
            "config.parallel.mesh = dict(data=4, fsdp=1, tensor=1)",
            f"config.train_dataloader.batch_size = {best}",
        ]
    assert "Plans, by the batch size" in format_search(plans, by_size=True)


def test_meshes_that_the_config_does_not_allow_are_left_out():
    def compile_some(candidates):
        refused = dict(fits=False, error="ConfigError: the rule 'up' must divide", reason="the rule")
        plans = zip(candidates, _compile(candidates, limit=400), strict=True)
        return [plan if each.mesh["tensor"] < 4 else dict(candidate=each._asdict(), **refused) for each, plan in plans]

    lines = []
    plans = search(build_space(CFG, parse_topology("v5e:2x2"), None), compile_some, lines.append)
    assert {plan["candidate"]["mesh"]["tensor"] for plan in plans} == {1, 2}
    assert "left out 1 meshes that the config does not allow: the rule" in lines


def test_only_data_crosses_slices():
    space = build_space(CFG, parse_topology("v5e:2x2", slices=2), None)
    assert [tuple(mesh.values())[:3] for mesh in space.meshes if mesh["tensor"] == 1] == [
        (8, 1, 1),
        (4, 2, 1),
        (2, 4, 1),
    ]
    assert {mesh["slices"]["data"] for mesh in space.meshes} == {2}
    lines = space.config_lines(Candidate(space.meshes[1], None, 8))
    assert lines[0] == "config.parallel.mesh = dict(data=4, fsdp=2, tensor=1, slices={'data': 2})"


def test_loops_of_unknown_length_are_reported():
    (best, *_) = plans = _search(CFG, "v5e:2x2", limit=400)
    assert "loops" not in format_search(plans)
    best["programs"]["update"]["unknown_loops"] = 2
    assert "unknown number of iterations, which are counted as one: 2\n" in format_search(plans)


def test_nothing_fits():
    plans = _search(CFG, "v5e:2x2", limit=1)
    assert {plan["fits"] for plan in plans} == {False}
    assert format_search(plans).endswith("Nothing fits.")


def test_a_mesh_and_a_model_without_remat_are_kept():
    cfg = dict(model=dict(type="M"), train_dataloader=dict(batch_size=8))
    space = build_space(cfg, parse_topology("h100:8"), {"data": 2, "fsdp": 4})
    assert (space.meshes, space.remat_paths) == ([{"data": 2, "fsdp": 4}], [])
    assert space.config_lines(Candidate({"data": 2, "fsdp": 4}, None, 8)) == [
        'config.parallel = dict(type="Pjit", mesh=dict(data=2, fsdp=4))',
        "config.train_dataloader.batch_size = 8",
    ]


def test_a_batch_of_all_processes_is_searched_with_its_own_key():
    cfg = dict(model=dict(type="M"), train_dataloader=dict(global_batch_size=8))
    space = batch_space(cfg, parse_topology("v5e:2x2"), None)
    assert space.overrides(Candidate(space.meshes[0], None, 16)) == ["--config.train_dataloader.global_batch_size=16"]
    best = search_batch(space, lambda candidates: _compile(candidates, limit=250), lambda line: None)[0]
    assert best["candidate"]["batch_size"] == 24  # 240 bytes; 28 and 32 need more than 250
    assert best["config_lines"][-1] == "config.train_dataloader.global_batch_size = 24"


def test_a_search_over_meshes_with_axes_of_other_names_is_refused():
    cfg = {**CFG, "parallel": dict(type="Pjit", batch_axes=("rows",))}
    with pytest.raises(ConfigError, match=r"`parallel.batch_axes` must be left out, got \('rows',\)"):
        build_space(cfg, parse_topology("h100:8"), None)
    assert build_space(cfg, parse_topology("h100:8"), {"rows": 8}).meshes == [{"rows": 8}]


def test_an_update_after_accumulation_counts_with_its_share():
    times = {"update": 5.0, "accumulate": 2.0}
    programs = {name: dict(seconds=t, compiler_seconds=t, bound_seconds=1.0) for name, t in times.items()}
    (plan,) = rank([dict(fits=True, programs=programs, accumulative_counts=4, examples_per_step=22)])
    assert plan["step_seconds"] == (5.0 + 3 * 2.0) / 4
    assert plan["examples_per_second"] == 8.0
