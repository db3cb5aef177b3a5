import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config import DATASETS, MODELS
from jengine.data import ArrayDataset
from jengine.extras.serving import BaseTTAModel, build_runner_with_tta
from jengine.model import FunctionalModel


@MODELS.register_module(force=True)
class PlusMinus(BaseTTAModel):
    """Average the predictions for x and x + 1."""

    def augment(self, batch):
        return [batch, {**batch, "x": batch["x"] + 1}]

    def merge_preds(self, predictions):
        return sum(predictions) / len(predictions)


def tenfold(sample):
    return {**sample, "x": 10 * sample["x"]}


def predictions(predictions, batch):
    return predictions


@pytest.fixture
def cfg(tmp_path):
    def make(**changes):
        x = np.array([1.0, 2.0], np.float32)
        model = FunctionalModel(
            init=lambda: {"w": jnp.ones(())},
            loss=lambda params: 0 * params["w"],
            predict=lambda params, batch: params["w"] * batch["x"],
        )
        data = dict(batch_size=2, dataset=ArrayDataset(dict(x=x)))
        metric = dict(type="MeanLoss", loss=predictions)
        return dict(
            model=model, work_dir=str(tmp_path / "run"),
            val_dataloader=data, val_cfg={}, val_evaluator=metric,
            test_dataloader=data, test_cfg={}, test_evaluator=metric,
            tta_model=dict(type="PlusMinus"), **changes,
        )  # fmt: skip

    return make


def test_the_test_merges_views_and_the_validation_does_not(cfg):
    given = cfg()
    runner = build_runner_with_tta(given)
    assert runner.test()["loss"] == 2.0  # the mean of 1, 2 and of 2, 3
    assert runner.val()["loss"] == 1.5
    assert "tta_model" in given
    assert [type(hook).__name__ for hook in runner.hooks].count("PrepareTTAHook") == 1


def test_a_pipeline_for_tta_replaces_that_of_the_test(cfg):
    config = cfg(tta_pipeline=[tenfold])
    assert build_runner_with_tta(config).test()["loss"] == 15.5  # of 10, 20 and of 11, 21
    config["test_dataloader"] = dict(
        batch_size=2,
        dataset=dict(
            type="PseudoLabelDataset",
            dataset=dict(
                type="TransformedDataset", dataset=config["test_dataloader"]["dataset"], pipeline=[tenfold] * 2
            ),
        ),
    )
    assert build_runner_with_tta(config).test()["loss"] == 15.5
    assert config["test_dataloader"]["dataset"]["dataset"]["pipeline"] == [tenfold] * 2  # not modified


def test_the_keys_may_be_variables_of_a_training_config(cfg):
    plain = cfg()
    variables = {"tta_model": plain.pop("tta_model"), "tta_pipeline": [tenfold]}
    assert build_runner_with_tta({**plain, "vars": variables}).test()["loss"] == 15.5


def test_missing_sections_are_reported(cfg):
    plain = cfg()
    with pytest.raises(ValueError, match="must have the key 'tta_model'"):
        build_runner_with_tta({**plain, "tta_model": None})
    with pytest.raises(ValueError, match="must have the key 'test_dataloader'"):
        build_runner_with_tta({**plain, "test_dataloader": None})
    with pytest.raises(ValueError, match="with tta_pipeline, test_dataloader must be a dict"):
        build_runner_with_tta({**plain, "test_dataloader": [dict(x=np.ones(2))], "tta_pipeline": [tenfold]})
    assert "TransformedDataset" in DATASETS
