"""Test that a validation with labels out of range ends with a message about them."""

import pytest

from jengine.config.errors import ConfigError
from tests.extras.diagnose.test_wrong_labels import classifier, labelled


@pytest.mark.parametrize("labels", [(0, 7, 1, 1), (0, 1, 1, 1, 2, 7)])
def test_a_validation_names_the_labels(make_runner, tmp_path, labels):
    runner = make_runner(
        model=classifier(),
        train_dataloader=labelled(0, 1, 2, 0),
        train_cfg=dict(max_epochs=1),
        val_dataloader=labelled(*labels),
        val_evaluator=dict(type="Accuracy"), validates=True,
    )
    with pytest.raises(
        ConfigError,
        match=r"`Accuracy.label` must be class indices .* got \d to 7 in the entry 'label'",
    ):
        runner.train()
    assert runner.iter == (
        0 if labels[1] == 7 else 2
    )  # a wrong label in the first batch is found before training
