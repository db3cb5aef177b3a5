import json
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from jengine.config import VISBACKENDS, VISUALIZERS, load_config, resolve
from jengine.logging import BaseVisBackend, LocalVisBackend, TensorboardVisBackend, Visualizer


class Recorder(BaseVisBackend):
    """Record all calls."""

    def __init__(self, save_dir="unused"):
        super().__init__(save_dir)
        self.calls = []

    def add_config(self, config):
        self.calls.append(("config", config))

    def add_graph(self, graph):
        self.calls.append(("graph", graph))

    def add_image(self, name, image, step=0):
        self.calls.append(("image", name, image.shape, step))

    def add_scalars(self, scalar_dict, step=0, file_path=None):
        self.calls.append(("scalars", dict(scalar_dict), step, file_path))

    def close(self):
        self.calls.append(("close",))


def test_every_backend_receives_the_same_values_and_steps():
    visualizer = Visualizer([{"type": Recorder, "name": "a"}, {"type": Recorder, "name": "b"}], save_dir="x")
    visualizer.add_scalar("loss", 1.0, step=3)
    visualizer.add_scalars({"loss": 0.5}, step=4, file_path="t.json")
    visualizer.add_image("cat", np.zeros((1, 2, 3), np.uint8), step=5)
    expected = [
        ("scalars", {"loss": 1.0}, 3, None),
        ("scalars", {"loss": 0.5}, 4, "t.json"),
        ("image", "cat", (1, 2, 3), 5),
    ]
    assert visualizer.get_backend("a").calls == expected
    assert visualizer.get_backend("b").calls == expected


def test_backends_without_histograms_receive_summary_statistics():
    visualizer = Visualizer([Recorder()])
    visualizer.add_histogram("w", np.array([1.0, 3.0]), step=2)
    expected = {"w/mean": 2.0, "w/std": 1.0, "w/min": 1.0, "w/max": 3.0}
    assert visualizer.get_backend("Recorder").calls == [("scalars", expected, 2, None)]


def test_processes_other_than_the_first_write_nothing(monkeypatch):
    visualizer = Visualizer([Recorder()])
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    visualizer.add_scalar("a", 1.0)
    visualizer.add_scalars({"a": 1.0})
    visualizer.add_image("a", np.zeros((1, 1, 3), np.uint8))
    visualizer.add_histogram("a", np.zeros(1))
    visualizer.add_config({"a": 1})
    visualizer.add_graph("g")
    assert visualizer.get_backend("Recorder").calls == []


def test_the_default_backend_writes_files_below_vis_data(tmp_path):
    visualizer = VISUALIZERS.build({"type": "Visualizer", "save_dir": str(tmp_path)})
    assert not (tmp_path / "vis_data").exists()  # nothing is created before the first value
    visualizer.add_scalars({"loss": 1.0}, step=1)
    assert json.loads((tmp_path / "vis_data" / "scalars.json").read_text()) == {
        "loss": 1.0,
        "step": 1,
    }


def test_without_save_dir_there_is_no_default_backend():
    assert Visualizer().vis_backends == {}
    with pytest.raises(TypeError, match="LocalVisBackend needs the argument 'save_dir'"):
        Visualizer([{"type": "LocalVisBackend"}])


def test_backends_are_built_from_configs_and_may_set_their_directory(tmp_path):
    backends = [
        {"type": "LocalVisBackend"},
        ConfigDict({"type": "TensorboardVisBackend", "save_dir": "/tb", "name": "tb"}),
    ]
    visualizer = Visualizer(backends, save_dir=tmp_path)
    assert isinstance(visualizer.get_backend("LocalVisBackend"), LocalVisBackend)
    assert isinstance(visualizer.get_backend("tb"), TensorboardVisBackend)
    assert visualizer.get_backend("LocalVisBackend").save_dir == tmp_path / "vis_data"
    assert str(visualizer.get_backend("tb").save_dir) == "/tb"
    assert backends[1].name == "tb"  # the config is unchanged


@pytest.mark.parametrize("as_config", [dict, ConfigDict])
def test_a_single_backend_needs_no_list(as_config, tmp_path):
    built = Visualizer(as_config({"type": "LocalVisBackend"}), save_dir=tmp_path).get_backend("LocalVisBackend")
    assert Visualizer(built).vis_backends == {"LocalVisBackend": built}


def test_config_is_written_as_a_config_file(tmp_path):
    visualizer = Visualizer(save_dir=tmp_path)
    visualizer.add_config(ConfigDict({"lr": 0.1}))
    assert resolve(load_config(tmp_path / "vis_data" / "config.py")) == {"lr": 0.1}
    visualizer.add_config("# verbatim\n")
    assert (tmp_path / "vis_data" / "config.py").read_text() == "# verbatim\n"


def test_graph_is_the_jaxpr_of_the_prediction_or_the_repr_of_the_model():
    class Net:
        def init(self, rng, batch):
            return {"w": jax.random.normal(rng, (3,))}, {}

        def predict(self, params, model_state, batch):
            return jnp.tanh(batch["x"] @ params["w"])

        def __repr__(self):
            return "Net()"

    recorder = Recorder()
    visualizer = Visualizer([recorder])
    visualizer.add_graph(Net(), {"x": np.ones((2, 3), np.float32)})
    visualizer.add_graph(Net())
    visualizer.add_graph(jnp.sin, np.ones(2, np.float32))
    visualizer.add_graph("text")
    texts = [text for _, text in recorder.calls]
    assert "dot_general" in texts[0]
    assert "f32[2] = tanh" in texts[0]
    assert texts[1] == "Net()"
    assert "sin" in texts[2]
    assert texts[3] == "text"


def test_subclasses_draw_samples(tmp_path):
    class Boxes(Visualizer):
        def add_datasample(
            self,
            name,
            image,
            data_sample=None,
            draw_gt=True,
            draw_pred=True,
            show=False,
            wait_time=0,
            step=0,
        ):
            self.add_image(name, image + 1, step)

    image = np.zeros((1, 1, 3), np.uint8)
    with pytest.raises(NotImplementedError, match="Visualizer cannot draw a dict: use LocalVisualizer"):
        Visualizer(save_dir=tmp_path).add_datasample("x", image, {})
    Boxes(save_dir=tmp_path).add_datasample("x", image, {}, step=2)
    assert (tmp_path / "vis_data" / "vis_image" / "x_2.png").is_file()


def test_close_closes_every_backend_and_can_be_repeated(tmp_path):
    recorder = Recorder()
    visualizer = Visualizer([recorder, {"type": "TensorboardVisBackend"}], save_dir=tmp_path)
    visualizer.add_scalar("a", 1.0)
    visualizer.close()
    visualizer.close()
    assert recorder.calls.count(("close",)) == 2


def test_built_in_classes_are_registered():
    backends = ("Local", "CSV", "Tensorboard", "Wandb", "MLflow")
    assert {f"{name}VisBackend" for name in backends} <= set(VISBACKENDS)
    assert "Visualizer" in set(VISUALIZERS)


def test_importing_the_package_imports_no_backend_library():
    heavy = ("tensorboard", "wandb", "mlflow", "PIL", "flax", "orbax")
    code = f"import sys, jengine.logging; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


class SlowBackend(Recorder):
    """Count writes that overlap in time."""

    def __init__(self):
        super().__init__()
        self.threads, self.overlaps = [], 0

    def add_scalars(self, scalar_dict, step=0, file_path=None):
        self.threads.append(threading.get_ident())
        for _ in range(500):
            self.overlaps += len(self.threads) > 1
        self.threads.pop()
        super().add_scalars(scalar_dict, step)


def test_threads_write_one_at_a_time():
    interval = sys.getswitchinterval()
    backend = SlowBackend()
    visualizer = Visualizer([backend])
    try:
        sys.setswitchinterval(1e-5)
        write = [lambda: [visualizer.add_scalar("a", 1.0, step) for step in range(50)]] * 4
        threads = [threading.Thread(target=job) for job in write]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert (len(backend.calls), backend.overlaps) == (200, 0)
