"""Test distillation in a run: values against loops by hand, devices, chunks, resume, and refusals."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jengine
from jengine.config import MODELS
from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.extras.distill import DistillHook
from jengine.extras.plan.flops import count_flops
from jengine.hooks import Hook
from jengine.model import CrossEntropy, FunctionalModel, LinenModel, NnxModel
from jengine.model.model import get_model
from tests.runner.conftest import build_runner

RNG = np.random.default_rng(0)
X = RNG.standard_normal((32, 6), np.float32)
Y = (X[:, 0] > 0).astype(np.int32)
DATA = dict(batch_size=8, dataset=ArrayDataset(dict(x=X, y=Y)), sampler=dict(type="DefaultSampler", shuffle=False))
LOSS = dict(type="CrossEntropy", label="y")


@MODELS.register_module(force=True)
class DistillLinen(nn.Module):
    """A hidden layer, normalized over the batch, and logits; the network sows what is between."""

    width: int = 4

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(self.width, name="hidden")(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        self.sow("intermediates", "active", nn.relu(x))
        return nn.Dense(3, name="head")(nn.relu(x))


@MODELS.register_module(force=True)
class DistillNnx(nnx.Module):
    """The same in NNX, without the norm."""

    def __init__(self, rngs, width=5):
        self.hidden, self.head = nnx.Linear(6, width, rngs=rngs), nnx.Linear(width, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x)))


LINEN = dict(type="LinenModel", module=dict(type="DistillLinen"), loss=LOSS, inputs="x")
NNX = dict(type="NnxModel", module=dict(type="DistillNnx"), loss=LOSS, inputs="x")


def make(work_dir, model=LINEN, hooks=(), **changes):
    cfg = dict(
        train_dataloader=DATA,
        train_cfg=dict(by_epoch=False, max_iters=6),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.3, momentum=0.9)),
        custom_hooks=list(hooks),
        log_level="WARNING",
    )
    return build_runner(work_dir, model, **{**cfg, **changes})


def distill(teacher, **settings):
    return dict(type="DistillHook", teacher=teacher, **settings)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """The work dirs of a trained teacher of each kind."""
    saved = dict(logger=None, checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=6))
    dirs = {"linen": tmp_path_factory.mktemp("linen"), "nnx": tmp_path_factory.mktemp("nnx")}
    module = dict(type="DistillLinen", width=8)
    make(dirs["linen"], {**LINEN, "module": module}, default_hooks=saved).train()
    make(dirs["nnx"], NNX, default_hooks=saved, precision="bfloat16").train()
    return {name: str(path) for name, path in dirs.items()}


class Losses(Hook):
    """Keep the metrics of each iteration."""

    acts_on = "metrics"

    def __init__(self):
        self.values = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.values.append({name: float(x) for name, x in outputs.items()})


def kl(logits, targets, temperature):
    p, q = (jax.nn.log_softmax(x / temperature) for x in (targets, logits))
    return temperature**2 * (jnp.exp(p) * (p - q)).sum(axis=-1).mean()


def cross_entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def by_hand(runner, params, loss, steps=6, **state):
    """Return the parameters after steps of SGD with momentum on `loss(params, batch, state)`, a value and new state."""
    tx = optax.sgd(0.3, momentum=0.9)
    opt_state, values = tx.init(params), []
    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for i in range(steps):
        rows = slice(8 * (i % 4), 8 * (i % 4) + 8)
        (value, state), grads = step(params, (X[rows], Y[rows]), state)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        values.append(float(value))
    return params, values


def assert_close(found, expected, **kwargs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **{"rtol": 2e-5, "atol": 2e-6, **kwargs}), found, expected)


def test_logits_and_projected_features_of_an_nnx_teacher_equal_a_loss_by_hand(tmp_path, teachers):
    features = [dict(student="active", teacher="hidden", project=True, loss_weight=0.5)]
    settings = dict(temperature=3.0, loss_weight=0.7, task_weight=0.3, features=features)
    losses = Losses()
    runner = make(tmp_path, hooks=[distill(teachers["nnx"], **settings), losses])
    initial = []
    runner.register_hook(keep_initial(initial))
    state = runner.train()
    teacher = jengine.load_model(teachers["nnx"])
    theirs = get_model(teacher.model).merge(*teacher.load(dict(x=X[:8])))
    bfloat16 = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(theirs))
    nnx.update(theirs, bfloat16)  # its own precision, in which the student does not compute

    def loss(params, batch, state):
        student = {name: x for name, x in params.items() if name != "distill_projections"}
        variables = {"params": student, "batch_stats": state["batch_stats"]}
        x, y = batch
        logits, new = DistillLinen().apply(variables, x, train=True, mutable=["batch_stats", "intermediates"])
        targets, hidden = (v.astype(jnp.float32) for v in (theirs(x.astype(jnp.bfloat16)), theirs.hidden(x.astype(jnp.bfloat16))))
        projection = params["distill_projections"]["feature_loss"]
        mapped = new["intermediates"]["active"][0] @ projection["kernel"] + projection["bias"]
        total = 0.3 * cross_entropy(logits, y) + 0.7 * kl(logits, targets, 3.0) + 0.5 * ((mapped - hidden) ** 2).mean()
        return total, {"batch_stats": new["batch_stats"]}

    params, model_state = initial[0]
    expected, values = by_hand(runner, params, loss, **model_state)
    assert_close([x["loss"] for x in losses.values], values)
    assert_close(state.params, expected)
    parts = losses.values[-1]
    assert parts["loss"] == pytest.approx(parts["main_loss"] + parts["distill_loss"] + parts["feature_loss"], rel=1e-6)
    # the projection is trained too, and is not part of what predicts
    start = params["distill_projections"]["feature_loss"]["kernel"]
    assert np.abs(state.params["distill_projections"]["feature_loss"]["kernel"] - start).max() > 1e-2
    assert_close(runner.predict(dict(x=X)), apply_linen(state.params, state.model_state, X))


def keep_initial(found):
    class KeepInitial(Hook):
        def before_train(self, runner):
            found.append(jax.device_get((runner.state.params, runner.state.model_state)))

    return KeepInitial()


def apply_linen(params, model_state, x, width=4):
    student = {name: leaf for name, leaf in params.items() if name != "distill_projections"}
    return DistillLinen(width).apply({"params": student, **model_state}, x)


def test_an_nnx_student_follows_a_linen_teacher_by_the_cosine_of_modules(tmp_path, teachers):
    features = [dict(student="hidden", teacher="norm", loss="cosine", project=True), dict(student="head")]
    losses, initial = Losses(), []
    hooks = [distill(teachers["linen"], loss_weight=0, features=features), losses, keep_initial(initial)]
    state = make(tmp_path, NNX, hooks).train()
    teacher = jengine.load_model(teachers["linen"])
    variables = dict(zip(("params", "model_state"), teacher.load(dict(x=X[:8])), strict=True))

    def loss(params, batch, state):
        x, y = batch
        hidden = x @ params["hidden"]["kernel"] + params["hidden"]["bias"]
        logits = jax.nn.relu(hidden) @ params["head"]["kernel"] + params["head"]["bias"]
        apply = DistillLinen(8).apply
        frozen = {"params": variables["params"], **variables["model_state"]}
        targets, sown = apply(frozen, x, mutable=["intermediates"], capture_intermediates=True)
        norm = sown["intermediates"]["norm"]["__call__"][0]
        projection = params["distill_projections"]["feature_loss"]
        mapped = hidden @ projection["kernel"] + projection["bias"]
        cosine = optax.losses.cosine_similarity(mapped, norm)
        return cross_entropy(logits, y) + (1 - cosine).mean() + ((logits - targets) ** 2).mean(), state

    expected, values = by_hand(None, initial[0][0], loss)
    assert_close([x["loss"] for x in losses.values], values)
    assert_close(state.params, expected)


def test_a_weight_may_change_during_training_without_a_new_trace(tmp_path, teachers):
    warmup = dict(type="WarmupParamHook", param_name="distill_loss_weight", value=0.5, warmup_epochs=1)
    losses = Losses()
    runner = make(tmp_path, hooks=[distill(teachers["nnx"]), warmup, losses])
    runner.train()
    assert losses.values[0]["distill_loss"] == 0 < losses.values[1]["distill_loss"]
    assert runner.programs.update.traces == 1


def test_the_teacher_is_an_input_of_the_program_and_has_no_gradients(tmp_path, teachers):
    runner = make(tmp_path, hooks=[distill(teachers["linen"])])
    kept = []

    class Watch(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            kept.append(runner.constants["teacher"])

    runner.register_hook(Watch())
    state = runner.train()
    (_, _, inputs), *_ = runner.programs.called().values()
    assert set(inputs.constants) == {"teacher"}
    traced = runner.programs.compiled["update"].trace(*runner.programs.called()["update"])
    assert not any(np.shape(const) == (6, 8) for const in traced.jaxpr.consts)
    assert kept[0] is kept[-1]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(kept))
    saved = jengine.load_model(teachers["linen"]).load(dict(x=X[:8]))
    assert_close((kept[0]["params"], kept[0]["model_state"]), saved, rtol=0, atol=0)
    assert "DistillHook" not in state.hook_state
    assert set(state.params) == {"hidden", "norm", "head"}
    # the two layers of the student: forward, and twice backward but for the inputs; the teacher's: forward
    student = 2 * 8 * (6 * 4 + 4 * 3) * 3 - 2 * 8 * 6 * 4
    assert sum(count_flops(traced.jaxpr).values()) == student + 2 * 8 * (6 * 8 + 8 * 3)


@pytest.fixture(scope="module")
def single_steps(tmp_path_factory, teachers):
    """A hook, and the state after training with it in single steps on one device."""
    hook = distill(teachers["nnx"], features=[dict(student="hidden", project=True)])
    return hook, make(tmp_path_factory.mktemp("single"), hooks=[hook]).train()


@pytest.mark.parametrize(
    "changes",
    [
        dict(train_cfg=dict(by_epoch=False, max_iters=6, steps_per_call=3)),
        dict(parallel=dict(type="Pjit", devices=4, mesh=dict(data=2, fsdp=2), fsdp_min_size=1)),
        dict(train_cfg=dict(by_epoch=False, max_iters=6, micro_batch=8)),
    ],
    ids=["chunks", "devices", "micro-batches"],
)
def test_chunks_and_devices_compute_the_same(tmp_path, teachers, single_steps, changes):
    hook, expected = single_steps
    other = make(tmp_path, hooks=[hook], **changes)
    sharded = []

    class Watch(Hook):
        every = 6

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            sharded.append(runner.constants["teacher"]["params"]["hidden"]["kernel"].sharding)

    other.register_hook(Watch())
    found = other.train()
    exact = dict(rtol=0, atol=0) if "steps_per_call" in str(changes) else {}
    assert_close((found.params, found.model_state), (expected.params, expected.model_state), **exact)
    if "fsdp" in str(changes):  # by the rule for sizes: the 6 rows are divided, as the 5 columns cannot be
        assert sharded[0].spec == jax.sharding.PartitionSpec("fsdp")


def test_accumulated_gradients_of_replicas_are_those_of_whole_batches(tmp_path, teachers):
    hook = distill(teachers["linen"], temperature=2.0)
    wrapper = dict(optimizer=dict(type="SGD", lr=0.3))
    whole = {**DATA, "batch_size": 16}
    expected = make(tmp_path / "one", NNX, [hook], optim_wrapper=wrapper, train_dataloader=whole).train()
    changes = dict(parallel=dict(type="DataParallel", devices=2), train_cfg=dict(by_epoch=False, max_iters=12))
    twice = {**wrapper, "accumulative_counts": 2}
    found = make(tmp_path / "two", NNX, [hook], optim_wrapper=twice, **changes).train()
    assert_close(found.params, expected.params)


@pytest.mark.parametrize("precision", [dict(precision="bfloat16"), dict(optim_wrapper=dict(
    type="AmpOptimWrapper", dtype="bfloat16", optimizer=dict(type="SGD", lr=0.3, momentum=0.9)))], ids=["policy", "wrapper"])
def test_the_teacher_keeps_its_precision_if_the_student_computes_in_another(tmp_path, teachers, precision):
    losses = Losses()
    features = [dict(student="active", teacher="active", project=True)]
    runner = make(tmp_path, hooks=[distill(teachers["linen"], features=features), losses], **precision)
    runner.train()
    traced = runner.programs.compiled["update"].trace(*runner.programs.called()["update"])
    projection = 3 * 4 * 8  # forward, and backward for both arguments
    assert count_flops(traced.jaxpr)["float32"] == 2 * 8 * (6 * 8 + 8 * 3 + projection)
    assert losses.values[0]["feature_loss"] > losses.values[-1]["feature_loss"]


def test_a_resumed_run_reads_the_same_teacher_and_ends_bit_identical(tmp_path, teachers):
    import shutil

    work_dir = tmp_path / "teacher"
    shutil.copytree(teachers["nnx"], work_dir)
    hook = distill(str(work_dir), features=[dict(student="hidden", project=True)])
    saves = dict(default_hooks=dict(logger=None, checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=3)))
    expected = make(tmp_path / "whole", hooks=[hook], **saves).train()
    half = make(tmp_path / "parts", hooks=[hook], **saves, train_cfg=dict(by_epoch=False, max_iters=3))
    half.train()
    # the teacher is trained further before the run goes on
    more = dict(logger=None, checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=6))
    make(work_dir, NNX, default_hooks=more, precision="bfloat16", resume=True, train_cfg=dict(by_epoch=False, max_iters=12)).train()
    found = make(tmp_path / "parts", hooks=[hook], **saves, resume=True).train()
    assert_close((found.params, found.opt_state), (expected.params, expected.opt_state), rtol=0, atol=0)
    stored = jengine.checkpoint.load(tmp_path / "parts")
    assert not [name for name in jax.tree_util.tree_leaves_with_path(stored.state) if "teacher" in str(name[0])]
    assert stored.meta["hooks"]["DistillHook"]["path"] == str(work_dir / "iter_6")
    # the projection is no part of the student
    predictions = jengine.load_model(tmp_path / "parts")(dict(x=X))
    assert_close(predictions, apply_linen(found.params, found.model_state, X))


def test_the_teacher_may_be_a_model_with_variables_or_a_config_with_weights(tmp_path, teachers):
    checkpoint = teachers["linen"]
    module = {**LINEN, "module": dict(type="DistillLinen", width=8)}
    params, model_state = jengine.load_model(checkpoint).load(dict(x=X[:8]))
    sources = [
        checkpoint,
        dict(config=dict(model=module), checkpoint=checkpoint),
        dict(model=LinenModel(DistillLinen(8), CrossEntropy("y"), inputs="x"), checkpoint=checkpoint),
        dict(model=module, params=jax.device_get(params), model_state=jax.device_get(model_state)),
    ]
    states = [
        make(tmp_path / str(i), hooks=[distill(source)], train_cfg=dict(by_epoch=False, max_iters=2)).train()
        for i, source in enumerate(sources)
    ]
    for state in states[1:]:
        assert_close(state.params, states[0].params, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (dict(teacher="three"), {}, r"logits of student and teacher must have one shape, got \(8, 3\) and \(8, 2\)"),
        (dict(features=[dict(student="hiden", teacher="hidden")]), {},
         r"modules of the student .* got 'hiden'; did you mean 'hidden'.* it has active, head, hidden, norm"),
        (dict(features=[dict(student="hidden", teacher="stem")]), {}, r"modules of the teacher .* 'stem'.* it has head, hidden"),
        (dict(features=[dict(student="hidden")]), {}, r"'hidden' must have .* \(8, 5\), got \(8, 4\); project=True trains"),
        (dict(features=[dict(student="hidden", loss="l1")]), {}, r"features\[0\]"),
        (dict(loss_weight=0), {}, "`loss_weight` must be above 0"),
        (dict(teacher=dict(model=NNX)), {}, r"a frozen model must be a checkpoint[\s\S]*custom_hooks\[0\].teacher`"),
        ({}, dict(model=FunctionalModel(lambda: {"w": jnp.zeros(6)}, lambda p, b: b["x"] @ p["w"])), "a LinenModel or an NnxModel, got Func"),
        ({}, dict(model=FunctionalModel(lambda: {"w": jnp.zeros(6)}, train_step=lambda state, batch, ctx: (state, {"loss": 0.0}))), "without a `train_step`"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, teachers, settings, changes, message):
    if settings.get("teacher") == "three":
        two = NnxModel(lambda rngs: nnx.Linear(6, 2, rngs=rngs), CrossEntropy("y"), inputs="x")
        settings = dict(teacher=dict(model=two, params={"kernel": np.zeros((6, 2)), "bias": np.zeros(2)}))
    with pytest.raises((ConfigError, TypeError), match=message):
        make(tmp_path, hooks=[distill(**{"teacher": teachers["nnx"], **settings})], **changes).train()


def test_a_hook_that_is_added_to_a_runner_is_refused(tmp_path, teachers):
    runner = make(tmp_path)
    runner.register_hook(DistillHook(teachers["nnx"]))
    with pytest.raises(ConfigError, match="among the hooks with which the Runner is built"):
        runner.train()
    assert runner.iter == 0
