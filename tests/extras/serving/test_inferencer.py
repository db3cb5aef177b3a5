import flax.linen as nn
import numpy as np
import pytest
from ml_collections import ConfigDict

from jengine.config import MODELS
from jengine.data import ArrayDataset, Pipeline
from jengine.extras.serving import BaseInferencer, BaseTTAModel
from jengine.model import CrossEntropy, LinenModel
from tests.runner.conftest import build_runner

X = np.random.RandomState(0).randn(7, 4).astype(np.float32)


class Classifier(BaseInferencer):
    visualize_kwargs = frozenset({"prefix"})
    postprocess_kwargs = frozenset({"labels"})

    def _init_pipeline(self, cfg):
        assert cfg["vars"] == {"scale": 2.0}
        return Pipeline(lambda x: {"x": x / cfg["vars"]["scale"]})

    def visualize(self, inputs, preds, prefix="class"):
        return [f"{prefix} {pred.argmax()}" for pred in preds]

    def postprocess(self, preds, visualization, return_datasample=False, labels=None):
        if return_datasample:
            return preds
        names = [labels[pred.argmax()] for pred in preds] if labels else preds
        return super().postprocess(names, visualization)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    labels = (X[:, 0] > 0).astype(np.int32)
    model = LinenModel(nn.Dense(2), CrossEntropy(), inputs="x")
    runner = build_runner(
        tmp_path_factory.mktemp("run"),
        model,
        train_dataloader=dict(batch_size=7, dataset=ArrayDataset(dict(x=X, label=labels))),
        train_cfg=dict(max_epochs=1),
        default_hooks={},
        cfg=dict(vars=dict(scale=2.0)),
    )
    runner.train()
    return runner, model


def test_inputs_pass_the_four_steps_in_batches_of_one_size(trained, capsys):
    runner, model = trained
    inferencer = Classifier(model, weights=runner.work_dir)
    expected = runner.predict({"x": X / 2})
    for batch_size in (3, 7):
        result = inferencer(list(X), batch_size=batch_size)
        np.testing.assert_allclose(np.stack(result["predictions"]), expected, rtol=1e-5, atol=1e-7)
        assert result["visualization"] == [f"class {row.argmax()}" for row in expected]
    assert "Inference" in capsys.readouterr().out
    named = inferencer(X[2], prefix="it is", labels=["left", "right"])
    assert named == {
        "predictions": [["left", "right"][expected[2].argmax()]],
        "visualization": [f"it is {expected[2].argmax()}"],
    }
    np.testing.assert_allclose(inferencer([X[0]], return_datasamples=True)[0], expected[0], rtol=1e-6)
    with pytest.raises(TypeError, match="Classifier has no argument 'label'; did you mean 'labels'"):
        inferencer([X[0]], label=[])


def test_a_directory_stands_for_its_files(tmp_path, trained):
    for name in ("b.png", "a.png"):
        (tmp_path / name).write_text("")
    runner, model = trained
    inferencer = Classifier(model, weights=runner.work_dir, show_progress=False)
    inferencer.preprocess = lambda inputs, batch_size: [] if inputs else None
    inferencer.visualize = lambda inputs, preds: inputs
    assert inferencer(str(tmp_path))["visualization"] == [str(tmp_path / "a.png"), str(tmp_path / "b.png")]


def test_the_model_may_be_a_whole_config(trained):
    runner, _ = trained
    model = dict(type="LinenModel", module=dict(type=nn.Dense, features=2), loss=dict(type="CrossEntropy"), inputs="x")
    for cfg in (dict(model=model), ConfigDict(dict(model=model))):
        inferencer = Classifier(cfg, weights=runner.work_dir, show_progress=False)
        np.testing.assert_allclose(inferencer(X[0])["predictions"][0], runner.predict({"x": X / 2})[0], rtol=1e-5)


def test_the_model_of_a_tta_model_may_be_a_config():
    MODELS.register_module(name="InferencerDense", module=nn.Dense, force=True)
    module = dict(type="LinenModel", inputs="x", loss=dict(type="CrossEntropy"))
    tta = BaseTTAModel(module=dict(module, module=dict(type="InferencerDense", features=2)))
    assert isinstance(tta.module, LinenModel)
    with pytest.raises(TypeError, match="LinenModel") as error:
        BaseTTAModel(module=dict(module))
    assert any("module" in note for note in error.value.__notes__)
