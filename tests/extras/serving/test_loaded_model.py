"""Test `jengine.load_model` and the export of a loaded model."""

import contextlib
import http.server
import importlib.util
import pathlib
import sys
import threading

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jengine
from jengine.checkpoint import CheckpointMismatchError
from jengine.cli import main
from jengine.config import DATASETS, MODELS, dump_config
from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.extras.serving import export_model
from jengine.extras.serving.trust import find_known_class, only_known_classes
from jengine.model import CrossEntropy, FunctionalModel, LinenModel
from jengine.runner import Runner
from jengine.train import compilation_counter
from tests.runner.conftest import build_runner

X = np.random.RandomState(0).randn(24, 4).astype(np.float32)


@DATASETS.register_module(force=True)
class PredictData(ArrayDataset):
    def __init__(self):
        super().__init__(dict(x=X, y=(X[:, 0] > 0).astype(np.int32)))


@MODELS.register_module(force=True)
class PredictLinen(nn.Module):
    """A layer and a BatchNorm."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm(use_running_average=not train, momentum=0.5, name="bn")(nn.Dense(2, name="dense")(x))


@MODELS.register_module(force=True)
class PredictNnx(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs):
        self.dense, self.bn = nnx.Linear(4, 2, rngs=rngs), nnx.BatchNorm(2, momentum=0.5, rngs=rngs)

    def __call__(self, x):
        return self.bn(self.dense(x))


def train(work_dir, model="LinenModel", module="PredictLinen", **changes):
    """Train for three iterations, save a checkpoint, and return the Runner."""
    loss = dict(type="CrossEntropy", label="y")
    cfg = dict(
        model=dict(type=model, module=dict(type=module), loss=loss, inputs="x"),
        work_dir=str(work_dir),
        train_dataloader=dict(batch_size=8, dataset=dict(type="PredictData")),
        train_cfg=dict(max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.5)),
        default_hooks=dict(logger=None),
    )
    runner = Runner.from_cfg({**cfg, **changes})
    runner.train()
    return runner


@pytest.fixture(scope="module")
def linen(tmp_path_factory):
    """Return a trained Runner with averages."""
    return train(tmp_path_factory.mktemp("linen"), custom_hooks=[dict(type="EMAHook", momentum=0.5)])


def apply(variables, x):
    """Return the predictions of the module with `(params, model_state)`."""
    return PredictLinen().apply({"params": variables[0], **variables[1]}, x)


def test_a_loaded_model_predicts_like_the_run_with_its_averages(linen):
    predict = jengine.load_model(linen.work_dir)
    found = predict(dict(x=X))
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, linen.predict(dict(x=X)))
    np.testing.assert_allclose(
        found, apply((linen.state.hook_state["EMAHook"].params, linen.state.model_state), X), rtol=1e-5
    )


def test_weights_selects_the_trained_values(linen):
    found = jengine.load_model(linen.work_dir, weights="trained")(dict(x=X))
    np.testing.assert_allclose(found, apply((linen.state.params, linen.state.model_state), X), rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        dict(custom_hooks=[dict(type="EMAHook", momentum=0.5, update_buffers=True)]),
        dict(custom_hooks=[dict(type="EMAHook", momentum=0.5, evaluate_on_ema=False)]),
        dict(custom_hooks=[dict(type="MeanTeacherHook", momentum=0.5, skip_buffer=False)]),
        dict(model="NnxModel", module="PredictNnx", precision="bfloat16"),
        dict(parallel=dict(type="DataParallel", devices=2), custom_hooks=[dict(type="SyncBuffersHook")]),
    ],
    ids=["averaged statistics", "raw", "teacher", "nnx in bfloat16", "replicas"],
)
def test_the_weights_are_those_that_the_run_validates(tmp_path, changes):
    runner = train(tmp_path, **changes)
    expected = runner.predict(dict(x=X))
    np.testing.assert_allclose(jengine.load_model(runner.work_dir)(dict(x=X)), expected, rtol=1e-5, atol=1e-6)
    others = {name: value for name, value in changes.items() if name in ("model", "module", "precision")}
    if not others:  # `test` and `predict` of a checkpoint use the same weights, on any number of devices
        cfg = {**runner.cfg, "work_dir": str(tmp_path / "other"), "load_from": runner.work_dir, "parallel": None}
        np.testing.assert_allclose(Runner.from_cfg(cfg).predict(dict(x=X)), expected, rtol=1e-5, atol=1e-6)


def test_a_fixed_batch_size_needs_one_program_for_all_sizes(linen):
    predict = jengine.load_model(linen.work_dir, batch_size=5)
    expected = linen.predict(dict(x=X))
    predict(dict(x=X))
    compiled = compilation_counter.count
    for size in (1, 4, 5, 6, 24):
        np.testing.assert_allclose(predict(dict(x=X[:size])), expected[:size], rtol=1e-5, atol=1e-6)
    assert compilation_counter.count == compiled


def test_several_threads_may_call_a_loaded_model(linen):
    predict, results = jengine.load_model(linen.work_dir, batch_size=8), {}

    def call(i):
        results[i] = predict(dict(x=X[i : i + 3]))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = linen.predict(dict(x=X))
    for i in range(8):
        np.testing.assert_allclose(results[i], expected[i : i + 3], rtol=1e-5, atol=1e-6)


def train_objects(work_dir, **changes):
    """Train with a model that is passed as an object."""
    model = LinenModel(PredictLinen(), CrossEntropy(label="y"), inputs="x")
    loader = dict(batch_size=8, dataset=PredictData())
    hooks = dict(logger=None)
    runner = build_runner(work_dir, model, train_dataloader=loader, train_cfg=dict(max_epochs=1), default_hooks=hooks, **changes)
    runner.train()
    return runner


def test_a_checkpoint_without_a_config_requires_the_model(tmp_path):
    runner = train_objects(tmp_path, cfg={})
    with pytest.raises(ConfigError, match="has no config from which the model can be built: pass `model=`"):
        jengine.load_model(tmp_path)
    model = LinenModel(PredictLinen(), CrossEntropy(label="y"), inputs="x")
    np.testing.assert_array_equal(jengine.load_model(tmp_path, model=model)(dict(x=X)), runner.predict(dict(x=X)))
    with pytest.raises(ValueError, match="must have averaged parameters, got none"):
        jengine.load_model(tmp_path, model=model, weights="averaged")
    other = FunctionalModel(lambda: {"w": jnp.zeros(2)}, lambda params: params["w"], lambda batch: batch["x"])
    with pytest.raises(CheckpointMismatchError, match="missing +w"):
        jengine.load_model(tmp_path, model=other)(dict(x=X))


def test_a_model_that_cannot_be_built_is_named_with_the_way_out(tmp_path):
    runner = train_objects(tmp_path, cfg=dict(model=dict(type="MissingModel")))
    with pytest.raises(KeyError, match="got 'MissingModel'") as caught:
        jengine.load_model(tmp_path)
    assert "import the module of its classes, or pass `model=`" in "".join(caught.value.__notes__)
    loaded = jengine.load_model(tmp_path, model=LinenModel(PredictLinen(), CrossEntropy(label="y"), inputs="x"))
    np.testing.assert_array_equal(loaded(dict(x=X)), runner.predict(dict(x=X)))


class OwnModule(nn.Module):
    """A class of the user's that is not registered."""

    features: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.features)(x)


def own_function(path):
    """Leave a file, as a function that a foreign config names."""
    pathlib.Path(path).touch()


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Return a function that gives a checkpoint the config of a model, and returns its work dir."""
    work_dir = tmp_path_factory.mktemp("foreign")
    train_objects(work_dir, cfg={})

    def write(model, **others):
        (work_dir / "config.py").write_text(dump_config(dict(model=model, **others)))
        return work_dir

    return write


def linen_model(module):
    return dict(type="LinenModel", module=module, loss=dict(type="CrossEntropy", label="y"), inputs="x")


class Touch:
    """Leave a file, as a class that a foreign config names."""

    def __init__(self, path):
        pathlib.Path(path).touch()


Module = type("Module", (Touch,), {"__module__": "flax.linen"})

FOREIGN = {
    "a function": lambda path: dict(type="os.system", command=f"touch {path}"),
    "a function of the user's": lambda path: dict(type=f"{__name__}.own_function", path=path),
    "a function in a module": lambda path: dict(type=f"{__name__}.contextlib.os.system", command=f"touch {path}"),
    "a class of Python": lambda path: dict(type="subprocess.Popen", args=["touch", path]),
    "a class of a package": lambda path: dict(type="numpy.memmap", filename=path, mode="w+", shape=1),
    "a module": lambda path: linen_model(dict(type="subprocess.Popen", args=["touch", path])),
    "a part of a module": lambda path: linen_model(
        dict(type=f"{__name__}.OwnModule", features=dict(type="os.system", command=f"touch {path}"))
    ),
    "a module of NNX": lambda path: {
        **linen_model(dict(type="subprocess.Popen", args=["touch", path])), "type": "NnxModel",
    },
    "a class that says it is of flax": lambda path: linen_model(dict(type=f"{__name__}.Module", path=path)),
    "a class of the user's that is not registered": lambda path: linen_model(dict(type=f"{__name__}.Touch", path=path)),
    "a module that is not imported": lambda path: dict(type="left_for_import.Model", path=path),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_the_config_of_a_foreign_checkpoint_runs_no_code(foreign, tmp_path, monkeypatch, case):
    path = tmp_path / "executed"
    (tmp_path / "left_for_import.py").write_text(f"import pathlib\npathlib.Path({str(path)!r}).touch()\nModel = dict\n")
    monkeypatch.syspath_prepend(tmp_path)
    work_dir = foreign(FOREIGN[case](str(path)))
    with pytest.raises(
        ConfigError, match=r"must name registered classes or networks of .*; if you trust the file, pass"
    ):
        jengine.load_model(work_dir)(dict(x=X))
    assert not path.exists()
    if "Popen" not in str(FOREIGN[case](path)):  # which runs in the background
        with contextlib.suppress(Exception):  # what is called is not a model
            jengine.load_model(work_dir, trust=True)(dict(x=X))
        assert path.exists()


def test_an_export_needs_trust_for_a_config_that_runs_code(foreign, tmp_path, capsys):
    path = tmp_path / "executed"
    work_dir = foreign(FOREIGN["a function of the user's"](str(path)))
    command = ["ckpt", "export", str(work_dir), "--jax-export", str(tmp_path / "out"), "--input", "x=float32[4]"]
    assert main(command) == 2
    assert "if you trust the file, pass trust=True (on the command line --trust)" in capsys.readouterr().err
    assert not path.exists()
    main([*command, "--trust"])
    assert path.exists()


def test_a_foreign_config_may_name_networks_of_packages_and_classes_of_the_user(foreign):
    for module in (dict(type="flax.linen.Dense", features=2), dict(type=f"{__name__}.OwnModule", features=2)):
        model = jengine.load_model(foreign(linen_model(module))).model
        assert model.module.features == 2


@pytest.mark.parametrize("name", ["jaxlib._jax", "_io", "numpy", "jengine.config.registry"])
def test_a_foreign_config_may_name_no_other_class_whatever_it_says_of_its_module(name):
    modules = {name: sys.modules[name]}
    classes = [key for key, value in vars(modules[name]).items() if isinstance(value, type)]
    assert len(classes) > 1
    with only_known_classes("checkpoint"):
        for key in classes:
            with pytest.raises(ConfigError, match="must name registered classes or networks of imported modules"):
                find_known_class(f"{name}.{key}", modules)


@pytest.fixture
def requests():
    """Yield a URL and the requests that a server there gets."""
    found = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", found
        server.shutdown()


def generator(tokenizer):
    module = dict(type="TransformerLM", vocab_size=257, width=8, depth=1, heads=1, mlp_width=8)
    return dict(type="TextGenerator", tokenizer=tokenizer, model={**linen_model(module), "inputs": "tokens"})


@pytest.mark.parametrize("place", ["{url}/tokenizer.json", "{tmp_path}/tokenizer.json", "memory://secret", "gs://a/b", "{link}"])
def test_a_foreign_config_reads_nothing_outside_of_the_checkpoint(foreign, tmp_path, requests, place):
    url, found = requests
    (tmp_path / "tokenizer.json").write_text("{}")
    work_dir = foreign(generator("bytes"))
    jengine.load_model(work_dir)
    link = work_dir / "epoch_1" / "tokenizer.json"
    link.symlink_to(tmp_path / "tokenizer.json")
    place = place.format(url=url, tmp_path=tmp_path, link=link)
    foreign(generator(place))
    with pytest.raises(ConfigError, match=f"must name only files in {work_dir}/epoch_1, got '{place}'; if you trust"):
        jengine.load_model(work_dir)
    link.unlink()
    assert found == []


@pytest.mark.parametrize("kind", ["gs_bucket", pytest.param("s3_bucket", marks=pytest.mark.many_processes)])
def test_a_checkpoint_in_a_bucket_is_read_without_trust_and_nothing_beside_it(request, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("JENGINE_LOCAL_DIR", str(tmp_path))
    url = f"{request.getfixturevalue(kind)}/run"
    runner = train_objects(url, cfg=dict(model=linen_model(dict(type="PredictLinen"))))
    expected = runner.predict(dict(x=X))
    np.testing.assert_allclose(jengine.load_model(url)(dict(x=X)), expected, rtol=1e-5, atol=1e-6)
    train_objects(f"{url}_2", cfg=dict(model=generator(f"{url}/tokenizer.json")))
    with pytest.raises(ConfigError, match="must name only files in"):
        jengine.load_model(f"{url}_2")


@pytest.mark.parametrize("is_local", [True, False])
def test_the_data_of_a_foreign_config_are_read_only_in_the_checkpoint(foreign, tmp_path, requests, capsys, is_local):
    url, found = requests
    (tmp_path / "a.json").write_text('{"metainfo": {}, "data_list": []}')
    dataset = dict(type="BaseDataset", ann_file=str(tmp_path / "a.json") if is_local else f"{url}/a.json")
    loader = dict(batch_size=1, num_workers=2, dataset=dataset)
    work_dir = foreign(linen_model(dict(type="flax.linen.Dense", features=2)), test_dataloader=loader)
    assert main(["ckpt", "export", str(work_dir), "--jax-export", str(tmp_path / "out")]) == 2
    assert "must name only files in" in capsys.readouterr().err
    assert found == []


def test_the_data_of_a_foreign_config_are_no_pickle(foreign, tmp_path, capsys):
    path = tmp_path / "executed"
    dataset = dict(type="BaseDataset", ann_file="a.pkl")
    work_dir = foreign(linen_model(dict(type="flax.linen.Dense", features=2)))
    pickled = work_dir / "epoch_1" / "a.pkl"
    pickled.write_bytes(f"cpathlib\nPath.touch\n(cpathlib\nPath\n(V{path}\ntRtR.".encode())
    dataset["ann_file"] = str(pickled)
    foreign(linen_model(dict(type="flax.linen.Dense", features=2)), test_dataloader=dict(batch_size=1, dataset=dataset))
    assert main(["ckpt", "export", str(work_dir), "--jax-export", str(tmp_path / "out")]) == 2
    assert "a config from elsewhere must name no pickle" in capsys.readouterr().err
    assert not path.exists()
    pickled.unlink()


needs_flatbuffers = pytest.mark.skipif(importlib.util.find_spec("flatbuffers") is None, reason="needs flatbuffers")

CALL = """
import sys
sys.modules["jengine"] = sys.modules["flax"] = None  # importing either raises an error
import jax, numpy as np
from jax import export
exported = export.deserialize(open(sys.argv[1], "rb").read())
x = np.load(sys.argv[2])
parts = [jax.jit(exported.call)({"x": part}) for part in (x[:5], x[5:])]
np.save(sys.argv[3], np.concatenate(parts))
"""


@needs_flatbuffers
def test_an_artifact_runs_without_the_code_of_the_model_for_any_batch_size(run_python, linen, tmp_path):
    path, inputs, outputs = tmp_path / "model.jaxexport", tmp_path / "x.npy", tmp_path / "out.npy"
    exported = export_model(jengine.load_model(linen.work_dir), dict(x=X, y=X[:, 0] > 0, mask=X[:, 0] > 0), path)
    assert exported.platforms == ("cpu", "cuda", "tpu")
    assert [(str(aval.dtype), str(aval.shape)) for aval in exported.in_avals] == [("float32", "(batch, 4)")]
    np.save(inputs, X)
    done = run_python(CALL, path, inputs, outputs)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(outputs), linen.predict(dict(x=X)), rtol=1e-5, atol=1e-6)


class Halves(LinenModel):
    """Predict in halves, which a symbolic batch size does not allow."""

    def predict(self, params, model_state, batch):
        x = batch["x"]
        if x.shape[0] % 2:
            raise ValueError(f"the batch must be even, got {x.shape[0]}")
        return super().predict(params, model_state, {**batch, "x": jnp.concatenate([x[: x.shape[0] // 2], x[1::2]])})


@needs_flatbuffers
def test_a_model_that_needs_a_fixed_batch_size_is_refused_with_the_option(linen, tmp_path):
    loss = CrossEntropy(label="y")
    predict = jengine.load_model(linen.work_dir, model=Halves(PredictLinen(), loss, inputs="x"))
    with pytest.raises(ConfigError, match="cannot be exported for any batch size; set one, with --batch-size N"):
        export_model(predict, dict(x=X), tmp_path / "model.jaxexport", platforms=["cpu"])
    assert not list(tmp_path.iterdir())
    exported = export_model(predict, dict(x=X), tmp_path / "model.jaxexport", platforms=["cpu"], batch_size=4)
    assert exported.out_avals[0].shape == (4, 2)
    with pytest.raises(ValueError, match="the batch must be even, got 3"):
        export_model(predict, dict(x=X), tmp_path / "model.jaxexport", platforms=["cpu"], batch_size=3)
