import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset, DataLoader
from jengine.extras.selfsup import (
    PIC,
    Extractor,
    Kmeans,
    PseudoLabelDataset,
    class_weights,
    describe_clusters,
)
from jengine.extras.selfsup.clustering import build_clustering
from jengine.extras.selfsup.pseudo_labels import uniform_indices
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from jengine.parallel import SingleDevice
from tests.refusals import check_refusal
from tests.runner.conftest import build_runner

K = 2


def make_blobs():
    """Return 16 samples around one point and 8 around another."""
    rng = np.random.RandomState(0)
    centers = np.where(np.arange(24)[:, None] % 3 == 0, [2.0, -2.0], [-1.0, 2.0])
    return ArrayDataset(dict(x=(centers + 0.1 * rng.randn(24, 2)).astype(np.float32)))


def make_model(**state):
    def compute_features(params, batch):
        return batch["x"] @ params["encoder"]["kernel"]

    def init(rng):
        a, b = jax.random.split(rng)
        params = {
            "encoder": {"kernel": jnp.eye(2) + 0.1 * jax.random.normal(a, (2, 2))},
            "head": {"kernel": jax.random.normal(b, (2, K)), "bias": jnp.zeros(K)},
        }
        return params, {name: jnp.asarray(value) for name, value in state.items()}

    def loss(params, model_state, batch):
        logits = compute_features(params, batch) @ params["head"]["kernel"] + params["head"]["bias"]
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["pseudo_label"][:, None], axis=1)[:, 0]
        weights = model_state.get("loss_weight", jnp.ones(K))[batch["pseudo_label"]]
        return {"loss": -log_probs * weights}, model_state

    return FunctionalModel(init, loss, lambda params, batch: {"features": compute_features(params, batch)})


class Recorder(Hook):
    """Record the labels of each iteration, and the state before and after each clustering."""

    def __init__(self):
        self.labels, self.before, self.after = [], {}, {}

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.labels.append(np.asarray(data_batch["pseudo_label"]))
        if batch_idx == 0:
            self.after[runner.epoch] = jax.tree.map(np.array, (runner.state.params, runner.state.opt_state.inner_state))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.before[runner.epoch + 1] = jax.tree.map(
            np.array, (runner.state.params, runner.state.opt_state.inner_state)
        )


def make_runner(work_dir, recorder=None, model=None, dataset=None, sampler=None, hook=None, **changes):
    cluster = dict(
        type="DeepClusterHook",
        extract_dataloader=dict(batch_size=5, dataset=make_blobs()),  # the last batch is padded
        clustering=dict(type="Kmeans", k=K, pca_dim=-1),
        unif_sampling=False,
        reweight=False,
        reweight_pow=0.5,
    )
    arguments = dict(
        train_dataloader=dict(batch_size=8, dataset=dataset or PseudoLabelDataset(make_blobs()), sampler=sampler),
        train_cfg=dict(max_epochs=3),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.05, momentum=0.9)),
        custom_hooks=[{**cluster, **(hook or {})}, *([recorder] if recorder else [])],
    )
    return build_runner(work_dir, model or make_model(), **{**arguments, **changes})


def train(work_dir, **changes):
    recorder = Recorder()
    runner = make_runner(work_dir, recorder, **changes)
    runner.train()
    assert runner.programs.update.traces == 1
    return runner, recorder


def is_same_clustering(labels, truth):
    """Return whether two clusterings are equal up to the names of the clusters."""
    return len({*zip(labels.tolist(), truth.tolist(), strict=True)}) == K


TRUTH = (np.arange(24) % 3 == 0).astype(int)


def test_the_data_are_clustered_before_training_and_after_each_epoch(tmp_path):
    runner, recorder = train(tmp_path)
    files = [np.load(tmp_path / f"cluster_epoch_{epoch}.npy") for epoch in range(4)]
    assert all(labels.dtype == np.int64 and is_same_clustering(labels, TRUTH) for labels in files)
    assert set(np.concatenate(recorder.labels)) == {0, 1}
    text = next(tmp_path.glob("*/*.log")).read_text()
    assert text.count("empty_num: 0\tmin_cluster: 8\tmax_cluster:16") == 4
    np.testing.assert_array_equal(runner.train_dataloader.dataset.pseudo_labels, files[3])


def test_the_head_and_its_momentum_are_reset_and_the_rest_does_not_change(tmp_path):
    _, recorder = train(tmp_path)
    for epoch in (1, 2):
        (params, inner), (new_params, new_inner) = recorder.before[epoch], recorder.after[epoch]
        np.testing.assert_array_equal(params["encoder"]["kernel"], new_params["encoder"]["kernel"])
        assert not np.isclose(params["head"]["kernel"], new_params["head"]["kernel"]).any()
        assert not new_params["head"]["bias"].any()
        old, new = (
            {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(i)} for i in (inner, new_inner)
        )
        heads = [path for path in old if "head" in path]
        encoders = [path for path in old if "encoder" in path]
        assert heads
        assert encoders
        assert all(old[path].any() and not new[path].any() for path in heads)
        assert all(old[path].any() and np.array_equal(old[path], new[path]) for path in encoders)
    assert not np.isclose(recorder.after[1][0]["head"]["kernel"], recorder.after[2][0]["head"]["kernel"]).any()


@pytest.mark.parametrize(("hook", "epochs"), [(dict(interval=2), [0, 2]), (dict(initial=False, interval=3), [3])])
def test_it_clusters_at_the_interval(tmp_path, hook, epochs):
    train(tmp_path, hook=hook)
    assert sorted(int(path.stem.split("_")[-1]) for path in tmp_path.glob("cluster_epoch_*.npy")) == epochs


def test_a_resumed_run_reads_its_labels_and_ends_with_the_same_state(tmp_path):
    arguments = dict(
        hook=dict(interval=2, unif_sampling=True, reweight=True),
        sampler=dict(type="DeepClusterSampler"),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1), logger=None),
    )
    weights = dict(loss_weight=np.ones(K, np.float32))
    uninterrupted, _ = train(tmp_path / "uninterrupted", model=make_model(**weights), **arguments)

    class Stop(Recorder):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if runner.iter == 7:  # in the third epoch, whose labels are from the clustering after the second
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_runner(tmp_path / "interrupted", Stop(), make_model(**weights), **arguments).train()
    mtimes = [(tmp_path / "interrupted" / f"cluster_epoch_{n}.npy").stat().st_mtime_ns for n in (0, 2)]
    resumed, _ = train(tmp_path / "interrupted", model=make_model(**weights), resume=True, **arguments)
    assert [(tmp_path / "interrupted" / f"cluster_epoch_{n}.npy").stat().st_mtime_ns for n in (0, 2)] == mtimes
    for a, b in zip(
        jax.tree.leaves((uninterrupted.state.params, uninterrupted.state.model_state)),
        jax.tree.leaves((resumed.state.params, resumed.state.model_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_replicas_end_with_the_parameters_of_a_single_device(tmp_path, accumulate):
    changes = dict(
        hook=dict(reweight=True, reweight_pow=1.0),
        optim_wrapper=dict(
            optimizer=dict(type="SGD", lr=0.05, momentum=0.9),
            # 3 iterations an epoch: the head is reset in the middle of a window
            accumulative_counts=accumulate,
        ),
    )
    ends = []
    for name, parallel in (("one", {}), ("four", dict(parallel=dict(type="DataParallel", devices=4)))):
        runner = make_runner(
            tmp_path / name, model=make_model(loss_weight=np.ones(K, np.float32)), **changes, **parallel
        )
        runner.train()
        ends.append((runner.state.params, runner.state.model_state["loss_weight"]))
    for a, b in zip(jax.tree.leaves(ends[0][0]), jax.tree.leaves(ends[1][0]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_allclose(ends[1][1], np.broadcast_to(ends[0][1], (4, K)), rtol=1e-6)  # one entry a replica


def test_a_uniform_epoch_visits_all_clusters_equally_often(tmp_path):
    _, recorder = train(tmp_path, hook=dict(unif_sampling=True, interval=2), sampler=dict(type="DeepClusterSampler"))
    counts = [np.bincount(np.concatenate(recorder.labels[3 * epoch : 3 * epoch + 3])).tolist() for epoch in range(3)]
    for epoch in (0, 2):  # 13 of each are drawn, and 24 of these are used
        assert min(counts[epoch]) >= 11
    assert sorted(counts[1]) == [8, 16]  # no clustering before it: each sample once


def test_class_weights_are_set_in_the_model_state(tmp_path):
    model = make_model(loss_weight=np.full(K, 1 / K, np.float32))
    runner, _ = train(tmp_path, model=model, hook=dict(reweight=True, reweight_pow=1.0))
    np.testing.assert_allclose(np.sort(runner.state.model_state["loss_weight"]), [1 / 3, 2 / 3], rtol=1e-6)


@pytest.mark.parametrize(
    ("counts", "power", "weights"),
    [  # (1 / count) ** power, normalized
        ([4, 1, 1], 0.5, [0.2, 0.4, 0.4]),
        ([100, 25, 4], 1.0, [0.03333333, 0.13333333, 0.83333333]),
        ([4, 1, 0], 0.5, [5e-06, 1e-05, 0.999985]),  # nearly all the weight is on the empty class
    ],
)
def test_class_weights_decrease_with_the_size(counts, power, weights):
    actual = class_weights(np.array(counts), power)
    np.testing.assert_allclose(actual, weights, rtol=1e-4 if 0 in counts else 1e-6)
    assert float(actual.sum()) == pytest.approx(1)
    assert actual.dtype == jnp.float32


def test_uniform_indices_include_every_class():
    labels = np.array([0, 0, 0, 0, 0, 1])
    for seed in range(20):
        indices = uniform_indices(labels, 2, np.random.RandomState(seed))
        assert len(indices) == 6
        assert set(labels[indices]) == {0, 1}
        large = indices[labels[indices] == 0]
        assert len(set(large)) == len(large)  # drawn without replacement: 5 samples are more than the share of 4


def test_uniform_indices_skip_empty_classes_and_fill_the_epoch():
    indices = uniform_indices(np.zeros(6, int), 3, np.random.RandomState(0))
    assert len(indices) == 6  # a share of 3, repeated


def test_the_cluster_sizes_are_described_in_one_line():
    counts = np.bincount([0, 0, 0, 0, 0, 1], minlength=2)
    assert describe_clusters(counts) == "empty_num: 0\tmin_cluster: 1\tmax_cluster:5"
    assert describe_clusters(np.array([3, 0, 0])) == "empty_num: 2\tmin_cluster: 0\tmax_cluster:3"


@pytest.mark.parametrize("pca_dim", [-1, 2])
def test_kmeans_finds_the_blobs_at_any_scale(pca_dim):
    features = make_blobs().arrays["x"] * [1.0, 50.0 if pca_dim > 0 else 1.0]
    labels = Kmeans(K, pca_dim)(features, seed=3)
    assert is_same_clustering(labels, TRUTH)
    np.testing.assert_array_equal(labels, Kmeans(K, pca_dim)(features, seed=3))


def find_pic_roots(features, sigma, nnn, alpha):
    """Return the root of each sample of power iteration clustering, computed sample by sample."""
    distances = ((features[:, None] - features[None]) ** 2).sum(axis=-1)
    directed = np.zeros_like(distances)
    for i, row in enumerate(distances):
        for j in np.argsort(np.where(np.arange(len(row)) == i, np.inf, row))[:nnn]:
            directed[i, j] = np.exp(-row[j] / sigma**2)
    graph = directed + directed.T
    centrality = np.ones(len(features)) / len(features)
    for _ in range(200):
        centrality = alpha * graph @ centrality + (1 - alpha) / len(features)
        centrality /= centrality.sum()
    roots = []
    for i in range(len(features)):
        while (gains := graph[i] * (centrality - centrality[i])).max() > 0:
            i = gains.argmax()
        roots.append(int(i))
    return np.array(roots)


def test_pic_follows_the_centrality_of_the_graph_of_neighbors():
    features = np.random.RandomState(1).randn(60, 3).astype(np.float32)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    roots = find_pic_roots(features.astype(np.float64), sigma=0.4, nnn=3, alpha=0.01)
    sizes = sorted(np.unique(roots, return_counts=True)[1], reverse=True)
    assert len(sizes) > 4
    pic = PIC(k=60, pca_dim=-1, sigma=0.4, nnn=3, alpha=0.01, distribute_singletons=False)
    labels = pic(features, seed=0)
    assert len({*zip(labels.tolist(), roots.tolist(), strict=True)}) == len(sizes)
    assert np.bincount(labels).tolist() == sizes  # the largest cluster is 0
    few = PIC(k=3, pca_dim=-1, sigma=0.4, nnn=3, alpha=0.01, distribute_singletons=False)(features, seed=0)
    assert (few[labels < 3] == labels[labels < 3]).all()
    means = np.stack([features[labels == label].mean(axis=0) for label in range(3)])
    closest = ((features[:, None] - means) ** 2).sum(axis=-1).argmin(axis=1)
    assert few[labels >= 3].tolist() == closest[labels >= 3].tolist()


def test_pic_finds_the_blobs_and_their_number():
    labels = PIC(k=10, pca_dim=-1, sigma=1.0, nnn=8, alpha=0.1)(make_blobs().arrays["x"], seed=0)
    assert is_same_clustering(labels, TRUTH)


def test_a_singleton_of_pic_joins_the_cluster_of_its_closest_neighbor():
    angles = np.array([0.0, 0.01, 0.02, 3.0, 3.01, 3.02, 1.0])  # the last is between, closer to the first three
    features = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    alone = PIC(k=3, pca_dim=-1, sigma=0.01, nnn=2, alpha=0.1, distribute_singletons=False)(features, seed=0)
    assert (alone == alone[6]).sum() == 1
    joined = PIC(k=3, pca_dim=-1, sigma=0.01, nnn=2, alpha=0.1)(features, seed=0)
    assert joined[6] == joined[2] != joined[3]


def test_a_run_clusters_by_power_iterations(tmp_path):
    clustering = dict(type="PIC", k=K, pca_dim=-1, sigma=1.0, nnn=8, alpha=0.1)
    runner, _ = train(tmp_path, hook=dict(clustering=clustering, interval=10))
    assert is_same_clustering(runner.train_dataloader.dataset.pseudo_labels, TRUTH)


def test_the_extractor_returns_the_features_of_a_run(tmp_path):
    runner = make_runner(tmp_path, hook=dict(interval=10), train_cfg=dict(max_epochs=1))
    runner.train()
    x = make_blobs().arrays["x"]
    extractor = Extractor(dict(batch_size=5, dataset=make_blobs()), seed=0, dist_mode=True)
    np.testing.assert_allclose(extractor(runner), x @ runner.state.params["encoder"]["kernel"], rtol=1e-5)
    with pytest.raises(ValueError, match="`Extractor.pool_cfg` must be None or .* got {'type': 'MultiPooling'}"):
        Extractor(dict(batch_size=5, dataset=make_blobs()), pool_cfg=dict(type="MultiPooling"))


def test_the_extractor_takes_the_mean_over_the_positions_of_a_map():
    maps = np.arange(24, dtype=np.float32).reshape(2, 2, 2, 3)
    model = FunctionalModel(lambda: {"w": jnp.ones(())}, lambda params, batch: params["w"], lambda params, batch: {"features": params["w"] * batch["x"]})  # fmt: skip
    strategy = SingleDevice()
    state = types.SimpleNamespace(params={"w": jnp.ones(())}, model_state={})
    runner = types.SimpleNamespace(model=model, state=state, strategy=strategy)
    extractor = Extractor(DataLoader(ArrayDataset(dict(x=maps)), 2), pool_cfg=dict(type="AvgPool2d"))
    np.testing.assert_allclose(extractor(runner), maps.mean(axis=(1, 2)))


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        (dict(type="Kmeans", k=25, pca_dim=-1), ["`k`", "24", "got 25"]),
        (dict(type="Kmeans", k=2, pca_dim=3), ["`pca_dim`", "24", "got 3"]),
        (dict(type="PIC", k=2, nnn=24, pca_dim=-1), ["`nnn`", "24", "got 24"]),
        (dict(type="PIC", k=2, pca_dim=3), ["PIC", "`pca_dim`", "24", "got 3"]),
    ],
)
def test_an_impossible_clustering_is_rejected(cfg, words):
    check_refusal(lambda: build_clustering(cfg)(make_blobs().arrays["x"], seed=0), ValueError, *words)


def test_several_optimizers_are_refused_before_the_first_clustering(tmp_path):
    sgd = dict(optimizer=dict(type="SGD", lr=0.05))
    with pytest.raises(ValueError, match=r"`optim_wrapper` must be one optimizer .* got \['encoder', 'head'\]"):
        make_runner(tmp_path, optim_wrapper=dict(encoder=sgd, head=sgd)).train()
    assert list(tmp_path.glob("cluster_epoch_*")) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(dataset=make_blobs()), r"must have assign_labels\(\), got ArrayDataset; use a PseudoLabelDataset"),
        (
            dict(hook=dict(unif_sampling=True)),
            r"must have set_uniform_indices\(\), got DefaultSampler; use a DeepClusterSampler",
        ),
        (
            dict(hook=dict(reweight=True)),
            "DeepClusterHook: the model state .* must have one entry 'loss_weight', got none",
        ),
        (dict(hook=dict(init_memory=True)), "DeepClusterHook: the model state must have one MemoryBank, got none"),
        (dict(hook=dict(head="hed")), "`head` must be a module of the model, got 'hed'; did you mean 'head'"),
        (
            dict(train_cfg=dict(by_epoch=False, max_iters=3)),
            "DeepClusterHook: `train_cfg.by_epoch` must be True, got False",
        ),
    ],
)
def test_missing_requirements_are_reported_before_training(tmp_path, changes, message):
    runner = make_runner(tmp_path, **changes)
    with pytest.raises(AssertionError, match=message):
        runner.train()
    assert runner.iter == 0


def test_a_plan_does_not_cluster(tmp_path):
    runner = make_runner(tmp_path)
    before = np.array([runner.train_dataloader.dataset[i]["pseudo_label"] for i in range(24)])
    runner.prepare_training(abstract=True)
    assert runner.state.is_abstract
    runner.hook_list.remove("timer")  # as a plan does: it watches a training until its end
    runner.call_hook("before_run")
    runner.call_hook("before_train")
    labels = np.array([runner.train_dataloader.dataset[i]["pseudo_label"] for i in range(24)])
    np.testing.assert_array_equal(labels, before)
    assert not list(tmp_path.glob("cluster_epoch_*"))
    runner.close()
