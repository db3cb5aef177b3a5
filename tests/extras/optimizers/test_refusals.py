"""What optimizers and their rules refuse: a call, its error, and the words that must be in the message."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.config import OPTIMIZERS, PARAM_SCHEDULERS
from jengine.config.errors import ConfigError
from jengine.extras.optimizers import ASGD, Muon
from jengine.extras.optimizers.parametrizations import Base
from jengine.hooks import EarlyStoppingHook
from jengine.model import FunctionalModel
from jengine.optim import SGD, AmpOptimWrapper, OptimWrapper, OptimWrapperDict, build_optim_wrapper
from jengine.optim.optimizers.optimizer_builder import build_optimizer
from jengine.train import build_train_step, create_train_state
from tests.optim.schedules.test_refusals import groups
from tests.refusals import check_row
from tests.runner_fixture import QuickRunner

TORCH_NAMES = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "LARS", "Lamb", "Lion", "NAdam", "ProximalAdan", "RAdam",
    "RMSprop", "Rprop", "SGD", "TorchAdafactor", "TorchMuon",
)  # fmt: skip
ARRAY = np.ones((2, 2), np.float32)
DENSE = {"kernel": ARRAY, "bias": ARRAY[0]}
LAYERS = {"layers": {"kernel": np.ones((3, 8, 12), np.float32), "bias": np.ones((3, 12), np.float32)}}
WEIGHTS = {"w": jnp.ones(3), "b": jnp.zeros(())}
PAIR = optax.LookaheadParams.init_synced(WEIGHTS)
BATCH = {"x": jnp.ones((8, 3)), "y": jnp.ones(8)}


def toy_vit():
    """Return parameters with the names of MMSelfSup's ViT."""
    return {"backbone": {"cls_token": ARRAY[0], "layers_0": DENSE, "layers_1": DENSE}, "head": DENSE}


def big_vision_vit(stacked=False):
    """Return parameters with the names of big_vision's ViT, whose layers may be stacked."""
    layers = {"encoderblock": {"kernel": np.ones((3, 2, 2))}} if stacked else {f"encoderblock_{i}": DENSE for i in range(3)}
    return {"cls": ARRAY, "pos_embedding": ARRAY, "embedding": DENSE, "Transformer": layers, "head": DENSE}


def build(params, constructor=None, types=None, rules=None, **optimizer):
    cfg = dict(optimizer={"type": "AdamW", "lr": 1.0, "weight_decay": 0.05, **optimizer}, paramwise_cfg=rules)
    return build_optim_wrapper(params, cfg | ({"constructor": constructor} if constructor else {}), module_types=types)


def mmselfsup(params, layer_pattern=None, **optimizer):
    if layer_pattern:
        optimizer["layer_pattern"] = layer_pattern
    return build(params, "mmselfsup.LearningRateDecayOptimWrapperConstructor", layer_decay_rate=0.9, **optimizer)


def mmseg(params, backbone, **rules):
    constructor = "LearningRateDecayOptimizerConstructor"
    return build(params, constructor, {"backbone": backbone}, dict(num_layers=2, decay_rate=0.9) | rules)


def stop_an_endless_loop(path):
    runner = QuickRunner(path / "run", [EarlyStoppingHook("acc")], epochs=1, epoch_length=1)
    runner.prepare_training()
    del runner.train_loop.stop_training
    runner.call_hook("before_run")


def grow_in_float32(dtype, compiled):
    """Compute gradients of a network that casts nothing, as float32 parameters ask for."""
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0), dtype=dtype)

    def step(params, opt_state):
        return wrapper.value_and_grad(lambda params: jnp.square(BATCH["x"] @ params["w"]).mean())(params, opt_state)

    (jax.jit(step) if compiled else step)(WEIGHTS, wrapper.init(WEIGHTS))


def own_step(wrapper, **settings):
    """Trace the step of a model that updates parameters of an optimizer `b` itself."""

    def train_step(state, batch, ctx):
        return ctx.update(state, lambda params: jnp.square(batch["x"] @ params["w"]).mean(), "b")

    step = build_train_step(FunctionalModel(init=lambda: WEIGHTS, train_step=train_step), wrapper, **settings)
    state = create_train_state(WEIGHTS, {}, wrapper, rng=jax.random.key(1))
    jax.eval_shape(step, state, BATCH, wrapper.hyperparams)


def monitor(name, metrics):
    PARAM_SCHEDULERS.build({"type": "ReduceOnPlateauLR", "monitor": name}, optimizer=groups()).step(metrics)


LOW_WITHOUT_CAST = (ValueError, "got float32", "`outputs = wrapper.autocast(apply_fn)")
UNKNOWN_NAMES = (ConfigError, "pos_embedding", "Transformer.encoderblock", "layer_pattern")
REFUSED = {
    # settings
    **{
        f"{name} with a rate below 0": (
            lambda name=name, key=key: OPTIMIZERS.build({"type": name, key: -0.1}), ValueError, f"`{name}.{key}`", "at least 0", "got -0.1",
        )
        for names, key in (([*TORCH_NAMES, "Muon", "NorMuon", "SOAP", "Shampoo"], "lr"), (["adamw", "sgd", "muon"], "learning_rate")) for name in names
    },
    "a rate that is a text": (lambda: OPTIMIZERS.build({"type": "SGD", "lr": "0.1"}), TypeError, "lr`", "number", "got '0.1'"),
    "a rate that is a schedule": (lambda: OPTIMIZERS.build({"type": "adamw", "learning_rate": optax.constant_schedule(0.1)}), TypeError, "param_scheduler"),
    "LBFGS of PyTorch": (lambda: build_optimizer({"type": "LBFGS"}), KeyError, "'LBFGS'", "did you mean 'lbfgs'"),
    "SparseAdam of PyTorch": (lambda: build_optimizer({"type": "SparseAdam"}), KeyError, "'SparseAdam'", "did you mean 'RAdam'"),
    "a misspelt dtype": (lambda: AmpOptimWrapper(optimizer=SGD(lr=1.0), dtype="flaot16"), ValueError, "got 'flaot16'"),
    "a misspelt metric of a plateau": (lambda: monitor("accuracy", {"accurac": 1.0}), KeyError, "'accuracy'", "did you mean 'accurac'"),
    "a loop that cannot be stopped": (lambda tmp_path: stop_an_endless_loop(tmp_path), AssertionError, "`stop_training`", "got EpochBasedTrainLoop"),
    # parameters
    "a matrix with a vector for Muon": (
        lambda: OptimWrapper(Muon(lr=0.1).with_groups([dict(params="layers")])).init(LAYERS), ConfigError, "Muon", "'layers.bias'", "got 'bias'", "adam=True",
    ),
    "a pair of parameters": (
        lambda: build_optim_wrapper(PAIR, optax.lookahead(optax.sgd(0.1), 3, 0.5)).init(PAIR), TypeError, "network's parameters", "LookaheadParams", "LookaheadHook",
    ),
    "layers of a tensor in two groups": (
        lambda: OptimWrapper(ASGD(lr=0.1).with_groups([{"params": f"layers[{i}]", "lr": 0.1 + i} for i in range(2)])).init({"layers": jnp.zeros((2, 3))}),
        ValueError, "ASGD", "whole tensors",
    ),
    "an optimizer without a rule of muP": (
        lambda: build_optim_wrapper(
            LAYERS, dict(optimizer=dict(type="LARS", lr=0.1), paramwise_cfg=dict(parametrization="mup", base={"width": {"model.width": 16}})),
            roles=lambda given: {}, base=lambda _: Base(lambda: LAYERS, 1.0, 1.0),
        ),
        ConfigError, "rule", "'LARS'",
    ),
    # layer-wise rates
    **{f"the model type {model_type!r}": (lambda model_type=model_type: mmselfsup(toy_vit(), model_type=model_type), AssertionError, "model_type`") for model_type in (None, "invalid")},
    "layer-wise rates without a decay": (
        lambda: build_optim_wrapper(toy_vit(), dict(optimizer=dict(type="SGD", lr=1.0, model_type="vit"), constructor="LearningRateDecayOptimWrapperConstructor")), AssertionError, "weight_decay",
    ),
    "a backbone without rules": (lambda: mmseg(toy_vit(), "ViT"), NotImplementedError, "'ViT'"),
    "a decay by stages of a ViT": (lambda: mmseg(toy_vit(), "MAE", decay_type="stage_wise"), NotImplementedError, "stage_wise"),
    "a misspelt kind of decay": (lambda: mmseg(toy_vit(), "ConvNeXt", decay_type="stage_wize"), ValueError, "decay_type`", "'stage_wize'", "did you mean 'stage_wise'"),
    "names that a ViT does not have": (lambda: mmselfsup(big_vision_vit(), model_type="vit"), *UNKNOWN_NAMES, "model_type='vit'", r"did you mean layer_pattern=r'encoderblock[._](\d+)'"),
    "stacked names that a ViT does not have": (lambda: mmselfsup(big_vision_vit(stacked=True), model_type="vit"), *UNKNOWN_NAMES, "model_type='vit'"),
    "names that a Swin does not have": (lambda: mmselfsup(big_vision_vit(), model_type="swin"), *UNKNOWN_NAMES, "model_type='swin'"),
    "names that a ConvNeXt does not have": (lambda: mmseg(big_vision_vit(), "ConvNeXt"), ConfigError, "`backbone.stages.0`", "ConvNeXt", "got cls, pos_embedding"),
    "a pattern of no name": (lambda: mmselfsup(big_vision_vit(), r"blocks_(\d+)"), ConfigError, "layer_pattern=r'blocks_(", "got cls, pos_embedding"),
    # kernel and bias of a 2 x 2 Dense have equal first axes, but no additional axis
    "a flat module for a stack": (lambda: mmselfsup({"layer": DENSE, "head": {"kernel": ARRAY}}, r"layers?[._](\d+)"), ConfigError, "layer_pattern"),
    # steps
    **{
        f"{dtype} without its products, {'compiled' if compiled else 'called'}": (lambda dtype=dtype, compiled=compiled: grow_in_float32(dtype, compiled), *LOW_WITHOUT_CAST, f"in {dtype}")
        for dtype in ("bfloat16", "float16") for compiled in (True, False)
    },
    "an own step with accumulation": (lambda: own_step(OptimWrapper(optax.sgd(0.1), accumulative_counts=2)), ValueError, "`accumulative_counts`", "train_step"),
    "an own step with phases": (lambda: own_step(OptimWrapperDict(w=OptimWrapper(optax.sgd(0.1))), phases=[("w", 1)]), ValueError, "phases", "None", "`train_step`"),
    "an own step with an unknown optimizer": (lambda: own_step(OptimWrapperDict(w=OptimWrapper(optax.sgd(0.1)))), ValueError, "`optimizer`", "'w'", "got 'b'"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_optimized_is_refused(row, request):
    check_row(request, *row)
