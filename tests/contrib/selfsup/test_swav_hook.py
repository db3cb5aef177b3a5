import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.contrib.selfsup import SwAVQueue, empty_queue, sinkhorn, swav_loss
from jengine.contrib.selfsup.swav import SwAVHook, whole_batches
from jengine.data import ArrayDataset
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from jengine.runner import Runner

DIM, PROTOTYPES = 4, 3


def embed(params, x):
    z = x @ params["encoder"]["kernel"]
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def swav_model():
    """Two views of each row, the second with its entries turned by one."""

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


class Look(Hook):
    """Keeps the queue at the start of each epoch and the parameters after each iteration."""

    priority = "LOWEST"

    def __init__(self):
        self.queues, self.params, self.moments, self.ends = {}, [], [], {}

    def before_train_epoch(self, runner):
        queue = runner.state.hook_state.get("SwAVHook")
        self.queues[runner.epoch] = None if queue is None else jax.tree.map(np.array, queue)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.params.append(jax.tree.map(np.array, runner.state.params))
        queue = runner.state.hook_state.get("SwAVHook")
        self.ends[runner.iter] = None if queue is None else jax.tree.map(np.array, queue)


def train(tmp_path, epochs=2, look=None, swav=None, **changes):
    x = np.random.RandomState(0).randn(8, 5).astype(np.float32)
    look = look or Look()
    arguments = dict(
        train_dataloader=dict(batch_size=4, dataset=ArrayDataset(dict(x=x))),
        train_cfg=dict(max_epochs=epochs),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.01)),
        default_hooks=dict(checkpoint=None, logger=None),
        custom_hooks=[dict(type="SwAVHook", batch_size=4, feat_dim=DIM, priority="VERY_HIGH", **(swav or {})), look],
    )
    runner = Runner(swav_model(), tmp_path, **{**arguments, **changes})
    runner.train()
    assert runner.programs.update.traces == 1
    return runner, look


@pytest.mark.parametrize(("length", "batch", "rounded"), [(300, 1, 300), (3840, 32 * 8, 3840), (1000, 32 * 8, 768)])
def test_the_queue_holds_whole_batches(length, batch, rounded):
    assert whole_batches(length, batch) == rounded
    hook = SwAVHook(batch_size=batch, queue_length=length)
    assert hook.init_traced_state({}, {}).rows.shape == (2, rounded, 128)


def test_without_a_length_there_is_no_queue(tmp_path):
    assert SwAVHook(batch_size=4).init_traced_state({}, {}) is None
    runner, look = train(tmp_path, epochs=1)
    assert look.queues == {0: None}
    assert "SwAVHook" not in runner.state.hook_state
    assert not (tmp_path / "queue.npy").exists()


def test_the_queue_begins_with_zeros_in_its_epoch(tmp_path):
    runner, look = train(tmp_path, epochs=17, swav=dict(queue_length=8, epoch_queue_starts=15))
    before, first, second = look.queues[14], look.queues[15], look.queues[16]
    assert not before.active
    assert first.active
    assert first.rows.shape == (2, 8, DIM)
    assert not first.rows.any()
    assert np.abs(second.rows).sum(axis=-1).all()  # two batches of four fill it
    assert not any(queue.use_queue for queue in look.queues.values())  # found out anew in each epoch
    assert not look.ends[2 * 15].use_queue  # empty in its first iterations
    assert look.ends[2 * 16].use_queue  # full in the next epoch, from the first iteration on
    assert runner.state.model_state == {}


def test_the_newest_embeddings_are_in_front(tmp_path):
    _, look = train(tmp_path, epochs=2, swav=dict(queue_length=8, epoch_queue_starts=0))
    np.testing.assert_array_equal(look.ends[1].rows[:, 4:], look.ends[0].rows[:, :4])
    np.testing.assert_array_equal(look.ends[2].rows[:, 4:], look.ends[1].rows[:, :4])
    np.testing.assert_allclose(np.linalg.norm(look.ends[1].rows, axis=-1), 1.0, rtol=1e-6)


def test_the_file_is_written_at_its_interval_and_read_by_the_next_run(tmp_path):
    setting = dict(queue_length=8, epoch_queue_starts=1, interval=2)
    train(tmp_path, epochs=1, swav=setting)
    assert not (tmp_path / "queue.npy").exists()  # neither its interval nor a queue to write
    _, look = train(tmp_path, epochs=3, swav=setting)
    stored = np.load(tmp_path / "queue.npy")
    np.testing.assert_array_equal(stored, look.ends[3].rows)  # after the second epoch, not after the third
    assert not (tmp_path / "queue.npy.tmp.npy").exists()
    _, again = train(tmp_path, epochs=1, swav=setting)
    assert again.queues[0].active  # although its epoch has not come
    np.testing.assert_array_equal(again.queues[0].rows, stored)
    with pytest.raises(
        ValueError, match=r"queue\.npy holds a queue of the shape \(2, 8, 4\), this run has \(2, 12, 4\)"
    ):
        train(tmp_path, epochs=1, swav={**setting, "queue_length": 12})


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    swav = dict(queue_length=8, epoch_queue_starts=1, frozen_layers_cfg={"prototypes": 5})
    saving = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1), logger=None)
    whole, _ = train(tmp_path / "whole", epochs=4, swav=swav, default_hooks=saving)

    class Stop(Look):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if runner.iter == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "broken", epochs=4, swav=swav, default_hooks=saving, look=Stop())
    again, _ = train(tmp_path / "broken", epochs=4, swav=swav, default_hooks=saving, resume=True)
    for a, b in zip(jax.tree.leaves(whole.state.params), jax.tree.leaves(again.state.params), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(whole.state.hook_state["SwAVHook"].rows, again.state.hook_state["SwAVHook"].rows)


def test_on_several_devices_the_queue_is_the_same(tmp_path):
    swav = dict(queue_length=8, epoch_queue_starts=1)
    one, _ = train(tmp_path / "one", epochs=3, swav=swav)
    four, _ = train(tmp_path / "four", epochs=3, swav=swav, parallel=dict(type="Pjit", devices=4))
    rows = [runner.state.hook_state["SwAVHook"].rows for runner in (one, four)]
    assert len(rows[1].sharding.device_set) == 4
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-5)


def test_layers_are_frozen_to_the_bit_each_for_its_own_time(tmp_path):
    _, look = train(tmp_path, epochs=3, swav=dict(frozen_layers_cfg={"encoder": 2, "prototypes": 4}))
    moved = {
        name: [
            not np.array_equal(a[name]["kernel"], b[name]["kernel"])
            for a, b in zip(look.params[:-1], look.params[1:], strict=True)
        ]
        for name in ("encoder", "prototypes")
    }
    # moves between the iterations 0-1, 1-2, 2-3, 3-4, 4-5; decay and momentum are held too
    assert moved["encoder"] == [False, True, True, True, True]
    assert moved["prototypes"] == [False, False, False, True, True]


def test_something_to_freeze_must_be_there(tmp_path):
    with pytest.raises(
        AssertionError, match=r"frozen_layers_cfg has 'prototipes', .* did you mean 'prototypes.kernel'"
    ):
        train(tmp_path, swav=dict(frozen_layers_cfg={"prototipes": 2}))


def test_a_model_that_loses_the_queue_is_told_so(tmp_path):
    def forgetful(params, model_state, batch):
        return {"loss": params["w"] * batch["x"].sum()}, {}

    model = FunctionalModel(lambda: ({"w": jnp.ones(())}, {}), forgetful)
    arguments = dict(
        train_dataloader=dict(batch_size=4, dataset=ArrayDataset(dict(x=np.ones((4, 1), np.float32)))),
        train_cfg=dict(max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        custom_hooks=[dict(type="SwAVHook", batch_size=4, queue_length=4)],
    )
    with pytest.raises(AssertionError, match=r"lends the model `model_state\['queue'\]`"):
        Runner(model, tmp_path, **arguments).train()


def test_a_queue_shorter_than_a_batch_is_refused():
    with pytest.raises(ValueError, match="queue_length=3 is shorter than a batch of 4"):
        SwAVHook(batch_size=4, queue_length=3)


def reference_sinkhorn(scores, epsilon=0.05, iterations=3):
    """The algorithm as the paper's appendix gives it, in float64."""
    weights = np.exp(np.asarray(scores, np.float64) / epsilon).T
    weights /= weights.sum()
    count, batch = weights.shape
    for _ in range(iterations):
        weights /= weights.sum(axis=1, keepdims=True) * count
        weights /= weights.sum(axis=0, keepdims=True) * batch
    return (weights * batch).T


def test_assignments_are_sinkhorns():
    scores = np.random.RandomState(0).uniform(-1, 1, (6, PROTOTYPES)).astype(np.float32)
    expected = reference_sinkhorn(scores)
    np.testing.assert_allclose(sinkhorn(scores), expected, rtol=1e-4, atol=1e-6)
    padded = np.concatenate([np.full((2, PROTOTYPES), 7, np.float32), scores])
    masked = sinkhorn(padded, jnp.arange(8) >= 2)
    np.testing.assert_allclose(masked[2:], expected, rtol=1e-4, atol=1e-6)
    assert not masked[:2].any()


@pytest.mark.parametrize("full", [False, True])
def test_the_loss_predicts_each_views_assignment_from_the_other(full):
    rng = np.random.RandomState(1)
    unit = lambda x: (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)  # noqa: E731
    views, earlier = unit(rng.randn(2, 4, DIM)), unit(rng.randn(2, 8, DIM))
    prototypes = unit(rng.randn(PROTOTYPES, DIM)).T
    queue = SwAVQueue(earlier, np.True_, np.False_) if full else empty_queue(2, 8, DIM)._replace(active=np.True_)

    expected = 0.0
    for view, other in ((0, 1), (1, 0)):
        rows = np.concatenate([earlier[view], views[view]]) if full else views[view]
        assignment = reference_sinkhorn(rows @ prototypes)[-4:]
        logits = views[other] @ prototypes / 0.1
        predicted = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected -= (assignment * predicted).sum(axis=1).mean() / 2

    loss, after = swav_loss(jnp.asarray(views), jnp.asarray(prototypes) * 3.0, queue)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert bool(after.use_queue) == full
    np.testing.assert_allclose(after.rows[:, :4], views, rtol=1e-6)
