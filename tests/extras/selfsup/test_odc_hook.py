import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.extras.selfsup import (
    MemoryBank,
    ODCHook,
    PseudoLabelDataset,
    empty_bank,
    update_samples,
)
from jengine.extras.selfsup.memory_bank import (
    count_labels,
    deal_with_small_clusters,
    update_centroids,
)
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from tests.runner.conftest import build_runner

K, N = 3, 24
SETTINGS = dict(
    type="ODCHook",
    centroids_update_interval=10,
    deal_with_small_clusters_interval=1,
    evaluate_interval=50,
    reweight=True,
    reweight_pow=0.5,
    min_cluster=2,
)


def normalize(features):
    return features / np.linalg.norm(features, axis=-1, keepdims=True)


def make_dataset():
    rng = np.random.RandomState(0)
    centers = np.array([[3.0, 0.0], [0.0, 3.0], [-3.0, -3.0]])[np.arange(N) % K]
    return ArrayDataset(dict(x=(centers + 0.1 * rng.randn(N, 2)).astype(np.float32)))


def make_model(length=N, **has):
    """Return a model that learns the labels in its memory and updates the memory; `has` removes state entries."""

    def init(rng):
        state = {"bank": empty_bank(length, 2, K), "loss_weight": jnp.full(K, 1 / K)}
        state = {name: entry for name, entry in state.items() if has.get(name, True)}
        return {"encoder": jnp.eye(2), "head": {"kernel": 0.1 * jax.random.normal(rng, (2, K))}}, state

    def loss(params, model_state, batch):
        features = batch["x"] @ params["encoder"]
        bank, label = model_state["bank"], model_state["bank"].labels[batch["index"]]
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(features @ params["head"]["kernel"]), label[:, None], axis=1)
        value = -log_probs[:, 0] * model_state["loss_weight"][label] * K
        bank, change_ratio = update_samples(bank, batch["index"], features)
        return {"loss": value, "change_ratio": change_ratio}, {**model_state, "bank": bank}

    def predict(params, batch):
        return {"features": batch["x"] @ params["encoder"]}

    return FunctionalModel(init, loss, predict)


class CallCounter:
    """Count the calls of ODCHook's methods."""

    def __init__(self, monkeypatch):
        self.calls = dict.fromkeys(("update_centroids", "deal_with_small_clusters", "evaluate"), 0)
        for name in self.calls:
            self.wrap(monkeypatch, name)

    def wrap(self, monkeypatch, name):
        method = getattr(ODCHook, name)

        def counted(hook, runner):
            self.calls[name] += 1
            method(hook, runner)

        monkeypatch.setattr(ODCHook, name, counted)


def make_runner(work_dir, *hooks, model=None, **changes):
    cluster = dict(
        type="DeepClusterHook",
        extract_dataloader=dict(batch_size=8, dataset=make_dataset()),
        clustering=dict(type="Kmeans", k=K, pca_dim=-1),
        unif_sampling=False,
        reweight=True,
        reweight_pow=0.5,
        init_memory=True,
        interval=10**9,
    )
    arguments = dict(
        train_dataloader=dict(batch_size=4, dataset=PseudoLabelDataset(make_dataset())),
        train_cfg=dict(max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.02, momentum=0.9)),
        custom_hooks=[cluster, *hooks],
    )
    return build_runner(work_dir, model or make_model(), **{**arguments, **changes})


def test_each_task_runs_at_its_interval(tmp_path, monkeypatch):
    counter = CallCounter(monkeypatch)
    loader = dict(batch_size=6, dataset=PseudoLabelDataset(make_dataset()))  # 4 iterations an epoch
    runner = make_runner(tmp_path, SETTINGS, train_dataloader=loader, train_cfg=dict(max_epochs=25))
    runner.train()
    assert runner.iter == 100
    assert counter.calls == dict(update_centroids=10, deal_with_small_clusters=100, evaluate=2)
    assert runner.programs.update.traces == 1
    bank, weights = runner.state.model_state["bank"], runner.state.model_state["loss_weight"]
    expected = 1 / np.sqrt(np.bincount(bank.labels, minlength=K))
    np.testing.assert_allclose(weights, expected / expected.sum(), rtol=1e-6)
    assert (
        next(tmp_path.glob("*/*.log")).read_text().count("empty_num: 0\tmin_cluster: ") == 3
    )  # one by DeepClusterHook
    for epoch in (10, 20):
        assert np.load(tmp_path / f"cluster_epoch_{epoch}.npy").dtype == np.int64
    assert not (tmp_path / "cluster_epoch_25.npy").exists()


def test_the_memory_starts_with_the_clustering(tmp_path):
    recorded = {}

    class Recorder(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if runner.iter == 0:
                recorded.update(jax.tree.map(np.array, runner.state.model_state["bank"]._asdict()))

    make_runner(tmp_path, Recorder()).train()
    labels = np.load(tmp_path / "cluster_epoch_0.npy")
    features = normalize(make_dataset().arrays["x"])
    np.testing.assert_array_equal(recorded["labels"], labels)
    np.testing.assert_allclose(recorded["features"], features, rtol=1e-5)
    means = [features[labels == k].mean(axis=0) for k in range(K)]
    np.testing.assert_allclose(recorded["centroids"], means, rtol=1e-5)


@pytest.mark.parametrize("parallel", [None, dict(type="DataParallel", devices=4)])
def test_a_resumed_run_ends_with_the_same_memory(tmp_path, parallel):
    changes = dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1), logger=None))
    changes |= {} if parallel is None else {"parallel": parallel}
    uninterrupted = make_runner(tmp_path / "uninterrupted", SETTINGS, **changes)
    uninterrupted.train()

    class Stop(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if runner.iter == 7:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_runner(tmp_path / "interrupted", SETTINGS, Stop(), **changes).train()
    resumed = make_runner(tmp_path / "interrupted", SETTINGS, resume=True, **changes)
    resumed.train()
    for a, b in zip(
        jax.tree.leaves((uninterrupted.state.params, uninterrupted.state.model_state)),
        jax.tree.leaves((resumed.state.params, resumed.state.model_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """The state of a run on one device."""
    return make_runner(tmp_path_factory.mktemp("one"), SETTINGS).train()


@pytest.mark.parametrize(
    "parallel",
    [
        dict(type="Pjit", devices=4),
        dict(type="DataParallel", devices=4),
        dict(type="DataParallel", mesh=dict(data=2, tensor=2), devices=4),
    ],
)
def test_on_several_devices_the_memory_and_the_parameters_are_those_of_one(one_device, tmp_path, parallel):
    four = make_runner(tmp_path, SETTINGS, parallel=parallel)
    four.train()
    assert four.programs.update.traces == 1
    states = [(state.params, state.model_state) for state in (one_device, four.state)]
    assert len(states[1][1]["bank"].features.sharding.device_set) == 4
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        for copy in [b] if a.shape == b.shape else b:  # of a replica each
            np.testing.assert_allclose(a, copy, atol=1e-5)
            np.testing.assert_array_equal(copy, b if a.shape == b.shape else b[0])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (make_model(bank=False), "ODCHook: the model state must have one MemoryBank, got none; .* `empty_bank`"),
        (make_model(loss_weight=False), "ODCHook: the model state .* must have one entry 'loss_weight', got none"),
        (make_model(length=5), "`min_cluster` must be at most 1 for 5 samples in 3 clusters, got 2"),
    ],
)
def test_missing_state_entries_are_reported_before_training(tmp_path, model, message):
    runner = make_runner(tmp_path, model=model, custom_hooks=[SETTINGS])
    with pytest.raises(AssertionError, match=message):
        runner.train()
    assert runner.iter == 0


def make_bank(features, labels, centroids):
    return MemoryBank(
        jnp.asarray(normalize(np.asarray(features, np.float32))),
        jnp.asarray(labels, jnp.int32),
        jnp.asarray(centroids, jnp.float32),
    )


def test_features_are_averaged_and_samples_assigned_to_the_nearest_centroid():
    bank = make_bank([[1, 0], [0, 1], [1, 0]], [0, 1, 0], [[1, 0], [0, 1]])
    index, features = jnp.array([2, 1]), jnp.array([[0.0, 5.0], [0.0, 2.0]])
    bank, change_ratio = jax.jit(lambda b: update_samples(b, index, features, momentum=0.75))(bank)
    averaged = normalize(0.25 * np.array([1.0, 0.0]) + 0.75 * np.array([0.0, 1.0]))
    np.testing.assert_allclose(bank.features, [[1, 0], [0, 1], averaged], rtol=1e-6, atol=1e-7)
    assert bank.labels.tolist() == [0, 1, 1]
    assert float(change_ratio) == 0.5  # one of the two


def test_centroids_are_means_and_stay_for_empty_clusters():
    bank = update_centroids(make_bank([[1, 0], [0, 1]], [1, 1], [[7, 7], [0, 0]]))
    np.testing.assert_allclose(bank.centroids, [[7, 7], [0.5, 0.5]])


def make_directions(degrees):
    radians = np.deg2rad(degrees)
    return np.stack([np.cos(radians), np.sin(radians)], axis=-1)


def test_a_small_cluster_is_emptied_and_refilled_with_half_of_the_largest():
    # label 0 around 0 and 40 degrees, label 1 around 120, and one sample of label 2 at 125
    degrees = [0, 1, 2, 40, 41, 42, 43, 120, 121, 122, 125]
    bank = make_bank(make_directions(degrees), [0] * 7 + [1] * 3 + [2], make_directions([20, 121, 125]))
    result = jax.jit(lambda b: deal_with_small_clusters(b, jax.random.key(0), min_cluster=2))(bank)
    labels = np.asarray(result.labels)
    assert labels[7:].tolist() == [1, 1, 1, 1]  # the single sample is assigned to the nearest other cluster
    assert len(set(labels[:3])) == len(set(labels[3:7])) == 1  # the largest is split at its gap
    assert {labels[0], labels[3]} == {0, 2}
    for label in (0, 2):
        np.testing.assert_allclose(result.centroids[label], result.features[labels == label].mean(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(result.centroids[1], bank.centroids[1])


def test_a_cluster_of_equal_features_is_split_at_random():
    bank = make_bank(np.ones((9, 2)), [0] * 9, np.ones((3, 2)))
    result = deal_with_small_clusters(bank, jax.random.key(0), min_cluster=1)
    assert sorted(count_labels(result).tolist()) == [2, 3, 4]  # 9 into 5 and 4, then 5 into 3 and 2


def test_without_a_small_cluster_nothing_changes():
    bank = make_bank(make_directions([0, 1, 90, 91]), [0, 0, 1, 1], make_directions([0, 90]))
    result = deal_with_small_clusters(bank, jax.random.key(0), min_cluster=2)
    for a, b in zip(bank, result, strict=True):
        np.testing.assert_array_equal(a, b)
