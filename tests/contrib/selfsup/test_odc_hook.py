import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.contrib.selfsup import MemoryBank, ODCHook, PseudoLabelDataset, empty_bank, update_samples
from jengine.contrib.selfsup.memory_bank import count_labels, deal_with_small_clusters, fill_bank, update_centroids
from jengine.data import ArrayDataset
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from jengine.runner import Runner

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


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def samples():
    rng = np.random.RandomState(0)
    centres = np.array([[3.0, 0.0], [0.0, 3.0], [-3.0, -3.0]])[np.arange(N) % K]
    return ArrayDataset(dict(x=(centres + 0.1 * rng.randn(N, 2)).astype(np.float32)))


def odc_model(length=N, **without):
    """Learns the labels in its memory, and moves the memory as it goes."""

    def init(rng):
        state = {"bank": empty_bank(length, 2, K), "loss_weight": jnp.full(K, 1 / K)}
        state = {name: part for name, part in state.items() if without.get(name, True)}
        return {"encoder": jnp.eye(2), "head": {"kernel": 0.1 * jax.random.normal(rng, (2, K))}}, state

    def loss(params, model_state, batch):
        features = batch["x"] @ params["encoder"]
        bank, label = model_state["bank"], model_state["bank"].labels[batch["index"]]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(features @ params["head"]["kernel"]), label[:, None], axis=1)
        value = -chosen[:, 0] * model_state["loss_weight"][label] * K
        bank, changed = update_samples(bank, batch["index"], features)
        return {"loss": value, "change_ratio": changed}, {**model_state, "bank": bank}

    def predict(params, batch):
        return {"features": batch["x"] @ params["encoder"]}

    return FunctionalModel(init, loss, predict)


class Count(Hook):
    """Counts what the hook does, and keeps the weights that each iteration leaves."""

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


def make(work_dir, *hooks, model=None, **changes):
    cluster = dict(
        type="DeepClusterHook",
        extract_dataloader=dict(batch_size=8, dataset=samples()),
        clustering=dict(type="Kmeans", k=K, pca_dim=-1),
        unif_sampling=False,
        reweight=True,
        reweight_pow=0.5,
        init_memory=True,
        interval=10**9,
    )
    arguments = dict(
        train_dataloader=dict(batch_size=4, dataset=PseudoLabelDataset(samples())),
        train_cfg=dict(max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.02, momentum=0.9)),
        default_hooks=dict(checkpoint=None, logger=None),
        custom_hooks=[cluster, *hooks],
    )
    return Runner(model or odc_model(), work_dir, **{**arguments, **changes})


def test_each_task_is_done_at_its_interval(tmp_path, monkeypatch):
    count = Count(monkeypatch)
    loader = dict(batch_size=6, dataset=PseudoLabelDataset(samples()))  # 4 iterations an epoch
    runner = make(tmp_path, SETTINGS, train_dataloader=loader, train_cfg=dict(max_epochs=25))
    runner.train()
    assert runner.iter == 100
    assert count.calls == dict(update_centroids=10, deal_with_small_clusters=100, evaluate=2)
    assert runner.programs.update.traces == 1
    bank, weights = runner.state.model_state["bank"], runner.state.model_state["loss_weight"]
    inverse = 1 / np.sqrt(np.bincount(bank.labels, minlength=K))
    np.testing.assert_allclose(weights, inverse / inverse.sum(), rtol=1e-6)
    assert (
        next(tmp_path.glob("*/*.log")).read_text().count("empty_num: 0\tmin_cluster: ") == 3
    )  # one by DeepClusterHook
    for epoch in (10, 20):
        assert np.load(tmp_path / f"cluster_epoch_{epoch}.npy").dtype == np.int64
    assert not (tmp_path / "cluster_epoch_25.npy").exists()


def test_the_memory_begins_with_the_clustering(tmp_path):
    seen = {}

    class Look(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if runner.iter == 0:
                seen.update(jax.tree.map(np.array, runner.state.model_state["bank"]._asdict()))

    make(tmp_path, Look()).train()
    labels = np.load(tmp_path / "cluster_epoch_0.npy")
    features = unit(samples().arrays["x"])
    np.testing.assert_array_equal(seen["labels"], labels)
    np.testing.assert_allclose(seen["features"], features, rtol=1e-5)
    means = [features[labels == k].mean(axis=0) for k in range(K)]
    np.testing.assert_allclose(seen["centroids"], means, rtol=1e-5)


def test_a_resumed_run_ends_with_the_same_memory(tmp_path):
    saving = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1), logger=None)
    whole = make(tmp_path / "whole", SETTINGS, default_hooks=saving)
    whole.train()

    class Stop(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if runner.iter == 7:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "broken", SETTINGS, Stop(), default_hooks=saving).train()
    again = make(tmp_path / "broken", SETTINGS, default_hooks=saving, resume=True)
    again.train()
    for a, b in zip(
        jax.tree.leaves((whole.state.params, whole.state.model_state)),
        jax.tree.leaves((again.state.params, again.state.model_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_on_several_devices_the_memory_is_the_same(tmp_path):
    one = make(tmp_path / "one", SETTINGS)
    four = make(tmp_path / "four", SETTINGS, parallel=dict(type="Pjit", devices=4))
    for runner in (one, four):
        runner.train()
    assert four.programs.update.traces == 1
    banks = [runner.state.model_state["bank"] for runner in (one, four)]
    assert len(banks[1].features.sharding.device_set) == 4
    np.testing.assert_array_equal(banks[0].labels, banks[1].labels)
    np.testing.assert_allclose(banks[0].features, banks[1].features, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (odc_model(bank=False), "ODCHook needs one MemoryBank in the model's state, found none: .* `empty_bank`"),
        (odc_model(loss_weight=False), "ODCHook needs one entry 'loss_weight' in the model's state"),
        (odc_model(length=5), "5 samples are too few for 3 clusters of min_cluster=2 or more"),
    ],
)
def test_what_the_model_lacks_is_named_before_training(tmp_path, model, message):
    runner = make(tmp_path, model=model, custom_hooks=[SETTINGS])
    with pytest.raises(AssertionError, match=message):
        runner.train()
    assert runner.iter == 0


def test_only_the_distributed_form_is_offered():
    with pytest.raises(AssertionError, match="dist_mode=False is not offered"):
        ODCHook(10, 1, 50, True, 0.5, dist_mode=False)


def bank_of(features, labels, centroids):
    return MemoryBank(
        jnp.asarray(unit(np.asarray(features, np.float32))),
        jnp.asarray(labels, jnp.int32),
        jnp.asarray(centroids, jnp.float32),
    )


def test_samples_move_to_the_mean_of_old_and_new_and_to_the_nearest_centroid():
    bank = bank_of([[1, 0], [0, 1], [1, 0]], [0, 1, 0], [[1, 0], [0, 1]])
    index, features = jnp.array([2, 1]), jnp.array([[0.0, 5.0], [0.0, 2.0]])
    bank, changed = jax.jit(lambda b: update_samples(b, index, features, momentum=0.75))(bank)
    moved = unit(0.25 * np.array([1.0, 0.0]) + 0.75 * np.array([0.0, 1.0]))
    np.testing.assert_allclose(bank.features, [[1, 0], [0, 1], moved], rtol=1e-6, atol=1e-7)
    assert bank.labels.tolist() == [0, 1, 1]
    assert float(changed) == 0.5  # one of the two


def test_centroids_are_means_and_those_of_empty_clusters_stay():
    bank = update_centroids(bank_of([[1, 0], [0, 1]], [1, 1], [[7, 7], [0, 0]]))
    np.testing.assert_allclose(bank.centroids, [[7, 7], [0.5, 0.5]])


def test_a_memory_needs_samples_of_every_label_and_the_right_shape():
    with pytest.raises(AssertionError, match=r"starts with samples of every label; \[1\] have none"):
        fill_bank(empty_bank(2, 2, 3), np.eye(2), [0, 2])
    with pytest.raises(AssertionError, match=r"of shape \(2, 2\), the features \(3, 2\)"):
        fill_bank(empty_bank(2, 2, 3), np.ones((3, 2)), [0, 1, 2])


def angles(degrees):
    radians = np.deg2rad(degrees)
    return np.stack([np.cos(radians), np.sin(radians)], axis=-1)


def test_a_small_cluster_is_emptied_and_gets_half_of_the_largest():
    # two bundles with label 0, around 0 and 40 degrees; label 1 around 120; one sample at 125 with label 2
    degrees = [0, 1, 2, 40, 41, 42, 43, 120, 121, 122, 125]
    bank = bank_of(angles(degrees), [0] * 7 + [1] * 3 + [2], angles([20, 121, 125]))
    found = jax.jit(lambda b: deal_with_small_clusters(b, jax.random.key(0), min_cluster=2))(bank)
    labels = np.asarray(found.labels)
    assert labels[7:].tolist() == [1, 1, 1, 1]  # the lonely sample went to the nearest of the others
    assert len(set(labels[:3])) == len(set(labels[3:7])) == 1  # the largest was parted where it falls apart
    assert {labels[0], labels[3]} == {0, 2}
    for label in (0, 2):
        np.testing.assert_allclose(found.centroids[label], found.features[labels == label].mean(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(found.centroids[1], bank.centroids[1])


def test_features_that_are_all_alike_are_halved_by_chance():
    bank = bank_of(np.ones((9, 2)), [0] * 9, np.ones((3, 2)))
    found = deal_with_small_clusters(bank, jax.random.key(0), min_cluster=1)
    assert sorted(count_labels(found).tolist()) == [2, 3, 4]  # 9 to 5 and 4, then 5 to 3 and 2


def test_without_a_small_cluster_nothing_changes():
    bank = bank_of(angles([0, 1, 90, 91]), [0, 0, 1, 1], angles([0, 90]))
    found = deal_with_small_clusters(bank, jax.random.key(0), min_cluster=2)
    for a, b in zip(bank, found, strict=True):
        np.testing.assert_array_equal(a, b)
