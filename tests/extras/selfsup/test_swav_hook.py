import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.extras.selfsup import SwAVQueue, empty_queue, sinkhorn, swav_loss
from jengine.extras.selfsup.swav import SwAVHook
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from tests.runner.conftest import build_runner

DIM, PROTOTYPES = 4, 3


def embed(params, x):
    z = x @ params["encoder"]["kernel"]
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def make_model():
    """Return a model with two views of each sample: the vector, and the vector rolled by one."""

    def init(rng):
        a, b = jax.random.split(rng)
        return {
            "encoder": {"kernel": jax.random.normal(a, (5, DIM))},
            "prototypes": {"kernel": jax.random.normal(b, (DIM, PROTOTYPES))},
        }, {}

    def loss(params, model_state, batch):
        views = jnp.stack([embed(params, batch["x"]), embed(params, jnp.roll(batch["x"], 1, axis=-1))])
        value, queue = swav_loss(views, params["prototypes"]["kernel"], model_state.get("queue"))
        return {"loss": value}, {} if queue is None else {"queue": queue}

    return FunctionalModel(init, loss)


class Recorder(Hook):
    """Record the queue before each epoch and after each iteration, and the parameters after each iteration."""

    priority = "LOWEST"

    def __init__(self):
        self.epoch_queues, self.iter_queues, self.params = {}, {}, []

    def before_train_epoch(self, runner):
        queue = runner.state.hook_state.get("SwAVHook")
        self.epoch_queues[runner.epoch] = None if queue is None else jax.tree.map(np.array, queue)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.params.append(jax.tree.map(np.array, runner.state.params))
        queue = runner.state.hook_state.get("SwAVHook")
        self.iter_queues[runner.iter] = None if queue is None else jax.tree.map(np.array, queue)


def train(tmp_path, epochs=2, recorder=None, swav=None, **changes):
    x = np.random.RandomState(0).randn(8, 5).astype(np.float32)
    recorder = recorder or Recorder()
    arguments = dict(
        train_dataloader=dict(batch_size=4, dataset=ArrayDataset(dict(x=x))),
        train_cfg=dict(max_epochs=epochs),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.01)),
        custom_hooks=[
            dict(type="SwAVHook", batch_size=4, feat_dim=DIM, priority="VERY_HIGH", **(swav or {})),
            recorder,
        ],
    )
    runner = build_runner(tmp_path, make_model(), **{**arguments, **changes})
    runner.train()
    assert runner.programs.update.traces == 1
    return runner, recorder


@pytest.mark.parametrize(
    ("length", "batch_size", "rounded"), [(300, 1, 300), (3840, 32 * 8, 3840), (1000, 32 * 8, 768)]
)
def test_the_queue_length_is_rounded_down_to_whole_batches(length, batch_size, rounded):
    hook = SwAVHook(batch_size=batch_size, queue_length=length)
    assert hook.init_traced_state({}, {}).rows.shape == (2, rounded, 128)


def test_without_a_length_there_is_no_queue(tmp_path):
    assert SwAVHook(batch_size=4).init_traced_state({}, {}) is None
    runner, recorder = train(tmp_path, epochs=1)
    assert recorder.epoch_queues == {0: None}
    assert "SwAVHook" not in runner.state.hook_state
    assert not (tmp_path / "queue.npy").exists()


def test_the_queue_starts_with_zeros_in_its_epoch(tmp_path):
    runner, recorder = train(tmp_path, epochs=17, swav=dict(queue_length=8, epoch_queue_starts=15))
    before, first, second = recorder.epoch_queues[14], recorder.epoch_queues[15], recorder.epoch_queues[16]
    assert not before.active
    assert first.active
    assert first.rows.shape == (2, 8, DIM)
    assert not first.rows.any()
    assert np.abs(second.rows).sum(axis=-1).all()  # filled by two batches of four
    assert not any(queue.use_queue for queue in recorder.epoch_queues.values())  # determined again in each epoch
    assert not recorder.iter_queues[2 * 15].use_queue  # empty in its first iterations
    assert recorder.iter_queues[2 * 16].use_queue  # full in the next epoch, from the first iteration on
    assert runner.state.model_state == {}


def test_the_newest_embeddings_are_at_the_front(tmp_path):
    _, recorder = train(tmp_path, epochs=2, swav=dict(queue_length=8, epoch_queue_starts=0))
    np.testing.assert_array_equal(recorder.iter_queues[1].rows[:, 4:], recorder.iter_queues[0].rows[:, :4])
    np.testing.assert_array_equal(recorder.iter_queues[2].rows[:, 4:], recorder.iter_queues[1].rows[:, :4])
    np.testing.assert_allclose(np.linalg.norm(recorder.iter_queues[1].rows, axis=-1), 1.0, rtol=1e-6)


def test_the_file_is_written_at_its_interval_and_read_by_the_next_run(tmp_path):
    swav = dict(queue_length=8, epoch_queue_starts=1, interval=2)
    train(tmp_path, epochs=1, swav=swav)
    assert not (tmp_path / "queue.npy").exists()  # neither the interval nor an active queue
    _, recorder = train(tmp_path, epochs=3, swav=swav)
    stored = np.load(tmp_path / "queue.npy")
    np.testing.assert_array_equal(stored, recorder.iter_queues[3].rows)  # after the second epoch, not after the third
    assert not (tmp_path / "queue.npy.tmp.npy").exists()
    _, restarted = train(tmp_path, epochs=1, swav=swav)
    assert restarted.epoch_queues[0].active  # although before epoch_queue_starts
    np.testing.assert_array_equal(restarted.epoch_queues[0].rows, stored)
    with pytest.raises(ValueError, match=r"queue\.npy must have the shape \(2, 12, 4\), got \(2, 8, 4\)"):
        train(tmp_path, epochs=1, swav={**swav, "queue_length": 12})


@pytest.mark.parametrize("parallel", [None, dict(type="DataParallel", devices=4)])
def test_a_resumed_run_ends_with_the_same_state(tmp_path, parallel):
    changes = dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1), logger=None))
    changes |= {} if parallel is None else {"parallel": parallel}
    swav = dict(queue_length=8, epoch_queue_starts=1, frozen_layers_cfg={"prototypes": 5})
    uninterrupted, _ = train(tmp_path / "uninterrupted", epochs=4, swav=swav, **changes)

    saved = tmp_path / "uninterrupted" / "iter_4"
    resumed, _ = train(tmp_path / "resumed", epochs=4, swav=swav, **changes, resume=saved)
    for a, b in zip(jax.tree.leaves(uninterrupted.state.params), jax.tree.leaves(resumed.state.params), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(
        uninterrupted.state.hook_state["SwAVHook"].rows, resumed.state.hook_state["SwAVHook"].rows
    )


STRATEGIES = [
    dict(type="Pjit", devices=4),
    dict(type="DataParallel", devices=4),
    dict(type="DataParallel", mesh=dict(data=2, tensor=2), devices=4),
]


@pytest.mark.parametrize("parallel", STRATEGIES)
def test_on_several_devices_the_queue_and_the_parameters_are_those_of_one(tmp_path, parallel):
    swav = dict(queue_length=8, epoch_queue_starts=1)
    one, _ = train(tmp_path / "one", epochs=4, swav=swav)
    four, _ = train(tmp_path / "four", epochs=4, swav=swav, parallel=parallel)
    states = [(runner.state.params, runner.state.hook_state["SwAVHook"]) for runner in (one, four)]
    assert states[0][1].use_queue
    assert len(states[1][1].rows.sharding.device_set) == 4
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    copies = [np.asarray(shard.data) for shard in states[1][1].rows.addressable_shards]
    for copy in copies[1:]:  # what is declared the same on all devices is the same
        np.testing.assert_array_equal(copy, copies[0])


@pytest.mark.parametrize("parallel", STRATEGIES[1:2])
def test_without_a_queue_replicas_assign_the_whole_batch_too(tmp_path, parallel):
    runners = [train(tmp_path / str(i), **changes)[0] for i, changes in enumerate(({}, {"parallel": parallel}))]
    for a, b in zip(*(jax.tree.leaves(runner.state.params) for runner in runners), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_layers_do_not_change_while_frozen_each_for_its_own_iterations(tmp_path):
    _, recorder = train(tmp_path, epochs=3, swav=dict(frozen_layers_cfg={"encoder": 2, "prototypes": 4}))
    changed = {
        name: [
            not np.array_equal(a[name]["kernel"], b[name]["kernel"])
            for a, b in zip(recorder.params[:-1], recorder.params[1:], strict=True)
        ]
        for name in ("encoder", "prototypes")
    }
    # whether they change between iterations 0-1, 1-2, 2-3, 3-4, 4-5, despite weight decay and momentum
    assert changed["encoder"] == [False, True, True, True, True]
    assert changed["prototypes"] == [False, False, False, True, True]


def reference_sinkhorn(scores, epsilon=0.05, iterations=3):
    """Return the assignments of the algorithm in the paper's appendix, in float64."""
    weights = np.exp(np.asarray(scores, np.float64) / epsilon).T
    weights /= weights.sum()
    count, batch = weights.shape
    for _ in range(iterations):
        weights /= weights.sum(axis=1, keepdims=True) * count
        weights /= weights.sum(axis=0, keepdims=True) * batch
    return (weights * batch).T


def test_sinkhorn_matches_the_reference():
    scores = np.random.RandomState(0).uniform(-1, 1, (6, PROTOTYPES)).astype(np.float32)
    expected = reference_sinkhorn(scores)
    np.testing.assert_allclose(sinkhorn(scores), expected, rtol=1e-4, atol=1e-6)
    padded = np.concatenate([np.full((2, PROTOTYPES), 7, np.float32), scores])
    masked = sinkhorn(padded, jnp.arange(8) >= 2)
    np.testing.assert_allclose(masked[2:], expected, rtol=1e-4, atol=1e-6)
    assert not masked[:2].any()


@pytest.mark.parametrize("full", [False, True])
def test_the_loss_predicts_the_assignment_of_each_view_from_the_other(full):
    rng = np.random.RandomState(1)
    normalize = lambda x: (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)  # noqa: E731
    views, earlier = normalize(rng.randn(2, 4, DIM)), normalize(rng.randn(2, 8, DIM))
    prototypes = normalize(rng.randn(PROTOTYPES, DIM)).T
    queue = SwAVQueue(earlier, np.True_, np.False_) if full else empty_queue(2, 8, DIM)._replace(active=np.True_)

    expected = 0.0
    for view, other in ((0, 1), (1, 0)):
        embeddings = np.concatenate([earlier[view], views[view]]) if full else views[view]
        assignment = reference_sinkhorn(embeddings @ prototypes)[-4:]
        logits = views[other] @ prototypes / 0.1
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected -= (assignment * log_probs).sum(axis=1).mean() / 2

    loss, updated = swav_loss(jnp.asarray(views), jnp.asarray(prototypes) * 3.0, queue)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert bool(updated.use_queue) == full
    np.testing.assert_allclose(updated.rows[:, :4], views, rtol=1e-6)
