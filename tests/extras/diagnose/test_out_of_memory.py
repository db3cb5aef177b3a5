"""Test that an error of a device without memory names the program, what that needs, and the remedies."""

import os
import re

import jax
import jax.numpy as jnp
import pytest

from jengine.config.explain import explain
from jengine.hooks import Hook
from jengine.model import FunctionalModel

PIB = 2**50  # bytes: more than a process can address, so that no system promises it
LOGGER = dict(checkpoint=None, logger=dict(type="LoggerHook", interval=1))


def huge(x):
    """Return a number whose computation needs buffers of 2 PiB: the input of a sort is one."""
    values = jnp.broadcast_to(jax.lax.stop_gradient(x.sum()), (2**9, 2**20, 2**20)) + jnp.arange(2.0**20)
    return jnp.sort(jnp.sort(values, axis=1), axis=0)[0, 0, 0]


class Waits(Hook):
    """Wait for the device after each iteration."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        float(outputs["loss"])


class Allocates(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        jnp.ones((PIB // 4,))


def build_model(params=2, loss=lambda params: params["w"].sum(), predict=lambda params: 0.0):
    return FunctionalModel(
        init=lambda: {"w": jnp.ones((params,))},
        loss=lambda params, batch: loss(params) + batch["y"],
        predict=lambda params, batch: predict(params) + batch["y"],
    )


STEP, VALIDATION = dict(loss=lambda params: huge(params["w"])), dict(predict=lambda params: huge(params["w"]))
CASES = {
    "a hook that waits": (STEP, dict(custom_hooks=[Waits()]), "the training step (update)", "temporaries"),
    "the log": (STEP, dict(default_hooks=LOGGER), "the training step (update)", "temporaries"),
    "a chunk": (STEP, dict(train_cfg=dict(max_epochs=1, steps_per_call=2)), "the training step (chunk)", "temporaries"),
    "a validation": (VALIDATION, {}, "the step of the validation", "temporaries"),
    "the state": (dict(params=PIB // 4), {}, "the creation of the state", "outputs 1,048,576.00 GiB"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_program_that_needs_too_much_memory_is_named_with_its_plan_and_the_remedies(make_runner, case):
    model, changes, program, plan = CASES[case]
    runner = make_runner(model=build_model(**model), validates=case == "a validation", **changes)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory allocating") as caught:
        runner.train()
    (note,) = [note for note in caught.value.__notes__ if "ran out of memory" in note]
    first, needs, *remedies = note.splitlines()
    assert re.fullmatch(rf"the device ran out of memory: cpu of [\d.,]+ GiB, in {re.escape(program)}", first)
    assert needs.startswith("  on each device it needs arguments ")
    assert plan in needs
    if case == "the state":
        assert runner.state is None
        assert "The largest array is params.w, f32[281474976710656]." in remedies[0]
        assert remedies[-1].endswith(f"; N must be at least {PIB // os.sysconf('SC_PHYS_PAGES') // 4096 + 1} here")
        return
    keys = [
        "optim_wrapper.accumulative_counts=N",
        "precision='bfloat16'",
        "parallel=dict(type='Pjit', mesh=dict(fsdp=N))",
    ]
    assert all(key in remedy for key, remedy in zip(keys, remedies[1:], strict=True))
    assert not any(note.startswith(("in Waits", "in LoggerHook")) for note in caught.value.__notes__)
    if case == "a validation":
        assert (runner.iter, runner.validations) == (4, [])
    if case == "a hook that waits":
        assert runner.iter == 0
        assert caught.value.__notes__[1] == "noticed at iteration 0 (epoch 0)"


def test_a_hook_that_needs_too_much_memory_itself_is_named(make_runner):
    runner = make_runner(custom_hooks=[Allocates()])
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        runner.train()
    assert runner.iter == int(runner.state.step) == 0
    notes = caught.value.__notes__
    assert "in Allocates.before_train_iter at iteration 0 (epoch 0)" in notes
    assert any(
        re.match(r"the device ran out of memory: cpu of [\d.,]+ GiB, in a program other than the training step\n", note)
        for note in notes
    )


@pytest.mark.parametrize(
    ("state", "batch", "remedy"),
    [
        (PIB, 8, r"The parameters and the state of the optimizer alone .* do not help\. .*\n  a model with 1/[0-9]+ of the memory: set a smaller `model.module.features`, now 281474976710656\n  more "),
        (8, PIB, r"The batch alone is larger than the memory: set a smaller `train_dataloader.batch_size`\."),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_alone_have_only_remedies_that_help(state, batch, remedy):
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    args = tuple(jax.ShapeDtypeStruct((size // 4,), jnp.float32) for size in (state, batch))
    cfg = {"model": {"module": {"features": PIB // 4, "depth": 2}}}
    explain(error, program=("the step", jax.jit(lambda state, batch: state[0] + batch[0]), args), cfg=cfg)
    assert re.search(rf"GiB, in the step\n  on each device .*\n{remedy}", error.__notes__[0])
    assert "precision=" not in error.__notes__[0]
