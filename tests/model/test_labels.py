import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import MaskedTuple
from jengine.errors import ConfigError
from jengine.evaluation import Accuracy
from jengine.model import CrossEntropy
from jengine.model.labels import LabelChecks

LOGITS = jnp.zeros((3, 4))


def compile_step(checks, loss=None, change=lambda batch: batch):
    loss = loss or CrossEntropy()
    return jax.jit(checks.watch(lambda logits, batch: loss(logits, change(batch)), argument=1))


def batch(*labels):
    return {"label": np.array(labels)}


def test_a_batch_that_waits_for_the_first_trace_is_checked_in_it():
    checks = LabelChecks()
    checks.add(batch(0, 1, 2))
    checks.add(batch(0, 1, 4))  # sent ahead
    message = (
        "`CrossEntropy.label` must be class indices from 0 to 3, as the outputs have 4 classes, got 0 to 4 in the entry "
        "'label' of a batch; set ignore_index=4 if this value marks what to leave out"
    )
    with pytest.raises(ConfigError) as error:
        compile_step(checks)(LOGITS, batch(0, 1, 2))
    assert str(error.value) == message


def test_later_batches_are_checked_before_they_are_used():
    checks = LabelChecks()
    compile_step(checks)(LOGITS, batch(0, 1, 2))
    checks.add(batch(0, 1, 3))
    with pytest.raises(ConfigError, match="got -1 to 4 in the entry 'label' of a batch; `ignore_index` sets a value"):
        checks.add(batch(-1, 1, 4))


def test_batches_are_checked_until_the_end_of_the_checks():
    checks = LabelChecks()
    compile_step(checks)(LOGITS, batch(0, 1, 2))
    with pytest.raises(ConfigError):
        checks.add(batch(9, 9, 9))
    checks.stop()
    checks.add(batch(9, 9, 9))


def test_ignored_labels_and_padding_are_allowed():
    checks = LabelChecks()
    compile_step(checks, CrossEntropy(ignore_index=255))(LOGITS, batch(0, 1, 2))
    checks.add(batch(0, 255, 2))
    checks.add({"label": np.array([0, 9, 255], np.uint8), "mask": np.array([True, False, True])})
    with pytest.raises(ConfigError, match="from 0 to 3 or ignore_index=255, as .* got 0 to 254"):
        checks.add(batch(0, 255, 254))


def test_labels_of_pixels_in_tuples_are_checked():
    checks, logits = LabelChecks(), jnp.zeros((2, 3, 3, 4))
    step = compile_step(checks, CrossEntropy(label="1.mask", ignore_index=255))
    labels = np.full((2, 3, 3), 255, np.uint8)
    step(logits, (logits, {"mask": labels}))
    checks.add((logits, {"mask": labels}))
    with pytest.raises(ConfigError, match=r"got 7 to 7 in the entry '1\.mask' of a batch"):
        checks.add((logits, {"mask": np.where(np.arange(3) == 1, np.uint8(7), labels)}))


def test_labels_that_the_step_changes_are_not_checked_on_the_host():
    checks = LabelChecks()
    step = compile_step(checks, change=lambda batch: {"label": batch["label"] - 1})
    checks.add(batch(1, 2, 4))
    assert np.isfinite(step(LOGITS, batch(1, 2, 4))["loss"]).all()
    checks.add(batch(1, 2, 4))


def test_a_step_without_labels_checks_nothing():
    checks = LabelChecks()
    checks.add(batch(9, 9, 9))
    jax.jit(checks.watch(lambda logits, batch: logits.sum(), argument=1))(LOGITS, batch(0, 1, 2))
    checks.add(batch(9, 9, 9))


def test_labels_in_a_scan_and_under_differentiation_are_found():
    checks = LabelChecks()

    def step(logits, batch):
        return jax.grad(lambda logits: CrossEntropy()(logits, batch)["loss"].sum())(logits), None

    step = checks.watch(step, argument=1)
    jax.jit(lambda batches: jax.lax.scan(step, LOGITS, batches))({"label": np.zeros((2, 3), int)})
    with pytest.raises(ConfigError, match="got 0 to 4"):
        checks.add(batch(0, 0, 4))


def test_accuracy_has_its_labels_checked_and_leaves_out_ignore_index():
    metric, checks = Accuracy(label=0, ignore_index=-1), LabelChecks()
    update = jax.jit(checks.watch(metric.update, argument=2))
    labels = MaskedTuple((np.array([0, -1, 1]),), np.array([True, True, False]))
    assert metric.compute(jax.device_get(update(metric.init(), LOGITS, labels))) == {"top1": 1.0}
    checks.add(labels)
    with pytest.raises(ConfigError, match="`Accuracy.label` must be class indices from 0 to 3 or ignore_index=-1"):
        checks.add(MaskedTuple((np.array([0, 0, 4]),), np.array([True, True, True])))
