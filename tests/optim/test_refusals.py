"""What optimizer wrappers and their rules refuse: a call, its error, and the words that must be in the message."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

from jengine.config.errors import ConfigError
from jengine.model import CrossEntropy, LinenModel, NnxModel
from jengine.optim import SGD, Adam, AdamW, OptimWrapper, OptimWrapperDict, build_optim_wrapper
from tests.refusals import check_row

PARAMS = {"w": np.ones(2, np.float32)}
DENSE = {"kernel": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)}
TOY = {"backbone": {"layer0": DENSE}, "head": DENSE}
LAYER = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
OPTIMIZER = {"type": "SGD", "lr": 1.0}
CONSTRUCTORS = (
    "DefaultOptimWrapperConstructor",
    "LearningRateDecayOptimWrapperConstructor",
    "LearningRateDecayOptimizerConstructor",
)
ADAMW = dict(type="AdamW", lr=6e-5, betas=(0.9, 0.999), weight_decay=0.01)
RULES = (
    None,
    {"norm_decay_mult": 0.0},
    # the ViT example in the documentation of MMSegmentation and MMSelfSup
    {"custom_keys": {"pos_embed": {"decay_mult": 0.0}, "cls_token": {"decay_mult": 0.0}}},
)


def build(optimizer=OPTIMIZER, params=TOY, **cfg):
    return build_optim_wrapper(params, dict(optimizer=optimizer, **cfg))


def update(tx, gradients=PARAMS, **arguments):
    tx.update(gradients, tx.init(PARAMS), **arguments)


def apply(wrapper, params):
    wrapper.apply_gradients(params, wrapper.init(params), params)


def raise_from_0(optimizer, name, value):
    wrapper = OptimWrapper(optimizer)
    wrapper.param_groups[0][name] = value
    return wrapper.hyperparams


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.Dense(4, name="fc")(nn.Dense(8, name="wide")(x)), None


class Scanned(nn.Module):
    """Layers that are stacked along the second axis."""

    @nn.compact
    def __call__(self, x, train=False):
        blocks = nn.scan(Wide, variable_axes={"params": 1}, split_rngs={"params": True}, length=3)
        return nn.Dense(3, name="head")(blocks(name="blocks")(x, None)[0])


def decay_by_layer():
    model = LinenModel(Scanned(), CrossEntropy())
    batch = dict(image=jnp.ones((4, 4)), label=jnp.zeros(4, jnp.int32))
    params, _ = jax.eval_shape(model.init, jax.random.key(0), batch)
    cfg = dict(
        optimizer={**OPTIMIZER, "weight_decay": 0.05},
        paramwise_cfg=dict(layer_pattern=r"blocks_(\d+)", layer_decay_rate=0.5),
        constructor="LearningRateDecayOptimWrapperConstructor",
    )
    build_optim_wrapper(params, cfg, module_types=model.module_types)


def make_net():
    return nnx.BatchNorm(2, rngs=nnx.Rngs(0))


REFUSED = {
    "a misspelled dtype of the state": (lambda: build_optim_wrapper(PARAMS, dict(optimizer=dict(type="AdamW", state_dtpe="int8"))), TypeError, "'state_dtpe'", "did you mean 'state_dtype'?"),
    # wrappers
    "weight decay without parameters": (lambda: update(OptimWrapper(AdamW(lr=0.1, weight_decay=0.1)).tx), ValueError, "`params`", "weight decay", "got None"),
    "groups of parameters without names": (
        lambda: optax.flatten(OptimWrapper(SGD(lr=1.0).with_groups([{"params": "w"}, {"params": "b", "lr": 0.1}])).tx).init(PARAMS),
        ValueError, "paths of parameters or modules", "got 'w'",
    ),
    "a weight decay that was 0": (lambda: raise_from_0(Adam(lr=0.1), "weight_decay", 0.1), ValueError, "`weight_decay`", "0.0", "got [0.1]"),
    "a momentum that was 0": (lambda: raise_from_0(SGD(lr=0.1), "momentum", 0.9), ValueError, "`momentum` of SGD", "0.0", "groups [0]", "got [0.9]"),
    "an unknown hyperparameter": (lambda: update(OptimWrapper(SGD(lr=0.1)), params=PARAMS, hyperparams={"rate": 1.0}), KeyError, "'learning_rate'", "'rate'"),
    "gradients of another structure": (lambda: update(OptimWrapper(SGD(lr=0.1)), {"b": 1}, params=PARAMS), ValueError, "Dict key mismatch"),
    "an accumulation of one batch": (lambda: OptimWrapper(SGD(lr=0.1)).accumulate(PARAMS, None), ValueError, "accumulative_counts", "above 1", "got 1"),
    "a complex parameter": (
        lambda: OptimWrapper(optax.adam(0.1)).init({"w": jnp.ones(2, jnp.complex64)}), TypeError, "'w'", "complex64", "real and imaginary parts",
    ),
    "a function of optax that is not called": (lambda: build_optim_wrapper(PARAMS, optax.adamw), TypeError, "dict", "optax gradient transformation", "function adamw"),
    "an optimizer among wrappers": (lambda: OptimWrapperDict(gen=SGD()), AssertionError, "`gen`", "OptimWrapper", "got Optimizer"),
    "gradients of a batch for those of its examples": (  # the axis of 8 inputs might be taken for 8 examples
        lambda: apply(OptimWrapper(optax.contrib.dpsgd(0.1, 1.0, 0.1, seed=0)), LAYER), ValueError, "(8,) for 'b'", "got ()",
    ),
    # what has the parameters
    "a state without parameters": (lambda: build(params=nnx.state(make_net(), nnx.BatchStat)), TypeError, "nnx.Param", "BatchStat"),
    **{
        f"a {type(model).__name__} before its init": (
            lambda model=model: build(params=model, paramwise_cfg={"norm_decay_mult": 0.0}), TypeError,
            f"got a {type(model).__name__}", "model.init(rng, batch)", "module_types=model.module_types",
        )
        for model in (LinenModel(nn.Dense(2), CrossEntropy()), NnxModel(lambda rngs: make_net(), CrossEntropy()))
    },
    # rules
    "a multiplier without a learning rate": (lambda: build({"type": "adafactor"}, paramwise_cfg={"bias_lr_mult": 2.0}), ConfigError, "`optimizer.lr`", "bias_lr_mult", "got none"),
    "a multiplier of a key without a learning rate": (
        lambda: build({"type": "adafactor"}, paramwise_cfg={"custom_keys": {"head": {"lr_mult": 2.0}}}), ConfigError, "`optimizer.lr`", "lr_mult", "got none",
    ),
    "a decay multiplier without a decay": (lambda: build(paramwise_cfg={"bias_decay_mult": 0.5}), ValueError, "`optimizer.weight_decay`", "bias_decay_mult", "got none"),
    "rules that freeze everything": (
        lambda: build({"type": "SGD"}, {"head": DENSE}, paramwise_cfg={"custom_keys": {"head": {"requires_grad": False}}}), ConfigError, "`paramwise_cfg`", "train",
    ),
    "layers along the second axis": (decay_by_layer, ValueError, "'blocks", "first axis", "(1,)"),
    # a comma after a dict
    **{
        f"a comma after the optimizer of a {constructor}, {'none' if rules is None else next(iter(rules))}": (
            lambda rules=rules, constructor=constructor: build((ADAMW,), paramwise_cfg=rules, constructor=constructor), (TypeError, ValueError), "optimizer", "got ", "AdamW",
        )
        for constructor in CONSTRUCTORS for rules in RULES
    },
    "a comma after the wrapper": (lambda: build_optim_wrapper(TOY, (dict(optimizer=OPTIMIZER),)), TypeError, "dict", "got tuple"),
    "a comma after the rules": (lambda: build(paramwise_cfg=({"bias_lr_mult": 2.0},)), TypeError, "paramwise_cfg`", "dict or None", "comma"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_optimized_is_refused(row, request):
    check_row(request, *row)
