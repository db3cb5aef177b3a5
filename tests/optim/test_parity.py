"""Trajectories recorded from MMEngine 0.10.7 on PyTorch 2.13 (CPU, float32), replayed gradient by gradient.

tests/data/parity contains NAME.json (the config) and NAME.npz (`init/PATH`, `grad/T/PATH`, `param/T/PATH`).
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.optim import AmpOptimWrapper, build_optim_wrapper
from jengine.optim.schedules import build_param_schedulers

pytestmark = pytest.mark.full_optimization

DATA = pathlib.Path(__file__).parent.parent / "data" / "parity"
SCHEDULES = sorted(path.stem for path in DATA.glob("sched_*.json"))
SCALERS = sorted(path.stem for path in DATA.glob("scaler_*.json"))
OPTIMIZATION = sorted(
    path.stem for path in DATA.glob("*.json") if not path.stem.startswith(("scaler_", "sched_", "ema_"))
)
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def load(name):
    return json.loads((DATA / f"{name}.json").read_text()), np.load(DATA / f"{name}.npz")


def tree(arrays, prefix):
    nested = {}
    for key in arrays:
        if key.startswith(prefix):
            *modules, leaf = key.removeprefix(prefix).split(".")
            node = nested
            for module in modules:
                node = node.setdefault(module, {})
            node[leaf] = jnp.asarray(arrays[key])
    return nested


def build(recorded, params):
    kinds = {"DepthwiseConv": "Conv"}
    types = {path: kinds.get(kind, kind) for path, (kind, _, _) in recorded.get("model", {}).items() if kind != "Param"}
    cfg = recorded.get("optim_wrapper", {"optimizer": recorded.get("optimizer")})
    return build_optim_wrapper(params, cfg, module_types=types)


@pytest.mark.parametrize("name", OPTIMIZATION)
def test_trajectory_matches_mmengine(name):
    recorded, arrays = load(name)
    params = tree(arrays, "init/")
    wrapper = build(recorded, params)
    wrapper.initialize_count_status(0, recorded["iters"])

    for quantity in ("lr", "weight_decay"):
        for path, values in recorded.get(quantity, {}).items():
            assert wrapper.param_settings[path].get(quantity, 0.0) == pytest.approx(values[0], rel=1e-9)

    @jax.jit
    def update(params, state, grads, hyperparams):
        updates, state = wrapper.update(grads, state, params, hyperparams)
        return optax.apply_updates(params, updates), state

    accumulate = jax.jit(wrapper.accumulate)
    state = wrapper.init(params)
    for t in range(recorded["iters"]):
        grads = tree(arrays, f"grad/{t}/")
        if wrapper.start_step():
            params, state = update(params, state, grads, wrapper.hyperparams)
        else:
            state = accumulate(grads, state)
        jax.tree.map(
            lambda p, expected: np.testing.assert_allclose(p, expected, **TOLERANCE),
            params,
            tree(arrays, f"param/{t}/"),
        )
    assert update._cache_size() == 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_parameters_match_mmengines_schedules(name):
    recorded, arrays = load(name)
    params = tree(arrays, "init/")
    wrapper = build(recorded, params)
    epoch_length = recorded["epoch_length"]
    schedulers = build_param_schedulers(
        recorded["param_scheduler"],
        wrapper,
        max_epochs=recorded["iters"] // epoch_length,
        max_iters=recorded["iters"],
        epoch_length=epoch_length,
    )

    @jax.jit
    def update(params, state, grads, hyperparams):
        updates, state = wrapper.update(grads, state, params, hyperparams)
        return optax.apply_updates(params, updates), state

    state = wrapper.init(params)
    for t in range(recorded["iters"]):
        for path, values in recorded["lr"].items():
            assert wrapper.param_settings[path]["lr"] == pytest.approx(values[t], rel=1e-9)
        params, state = update(params, state, tree(arrays, f"grad/{t}/"), wrapper.hyperparams)
        jax.tree.map(
            lambda p, expected: np.testing.assert_allclose(p, expected, **TOLERANCE),
            params,
            tree(arrays, f"param/{t}/"),
        )
        for scheduler in schedulers:
            if not scheduler.by_epoch or (t + 1) % epoch_length == 0:
                scheduler.step()
    assert update._cache_size() == 1  # every rate was an input of the same program


@pytest.mark.parametrize("name", SCALERS)
def test_loss_scale_matches_gradscaler(name):
    recorded, arrays = load(name)
    wrapper = AmpOptimWrapper(
        optimizer=recorded["optimizer"], clip_grad=recorded["clip_grad"], loss_scale=recorded["loss_scale"]
    )
    params = {"w": jnp.asarray(arrays["init"])}
    state = wrapper.init(params)

    @jax.jit
    def update(params, state, grad, hyperparams):
        updates, state = wrapper.update({"w": grad * optax.tree.get(state, "loss_scale")}, state, params, hyperparams)
        return optax.apply_updates(params, updates), state

    for t, grad in enumerate(arrays["grad"]):
        params, state = update(params, state, grad, wrapper.hyperparams)
        assert float(optax.tree.get(state, "loss_scale")) == recorded["scale"][t]
        assert int(optax.tree.get(state, "growth_tracker")) == recorded["growth_tracker"][t]
        np.testing.assert_allclose(params["w"], arrays["param"][t], **TOLERANCE)
    assert update._cache_size() == 1
