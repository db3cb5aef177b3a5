"""Models in the shapes of Flax's examples train with at most ten lines of glue each.

The modules below stand for a user's own code; the functions `glue_*` are what the engine requires in addition.
"""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jengine.data import ArrayDataset
from jengine.model import CrossEntropy, LinenModel, NnxModel
from tests.runner.conftest import build_runner

RANDOM = np.random.RandomState(0)
IMAGES = ArrayDataset(dict(image=RANDOM.rand(16, 8, 8, 1).astype(np.float32), label=np.arange(16) % 4))
TOKENS = ArrayDataset(dict(inputs=np.cumsum(np.ones((16, 8), np.int32), axis=1) % 7 + 1))
VECTORS = ArrayDataset(dict(image=RANDOM.randn(16, 6).astype(np.float32), label=np.arange(16) % 4))


# --- An NNX classifier whose call receives the random streams. ---


class Digits(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout1, self.dropout2 = nnx.Dropout(0.1), nnx.Dropout(0.1)
        self.hidden, self.head = nnx.Linear(64, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x, rngs: nnx.Rngs | None = None):
        x = nnx.relu(self.norm(self.dropout1(self.conv(x), rngs=rngs)))
        x = nnx.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1)
        return self.head(self.dropout2(nnx.relu(self.hidden(x)), rngs=rngs))


def glue_digits():
    return NnxModel(Digits, CrossEntropy()), IMAGES


# --- A Linen language model, whose mode is part of its configuration. ---


@dataclasses.dataclass(frozen=True)
class LMConfig:
    vocabulary: int = 10
    width: int = 8
    layers: int = 2
    deterministic: bool = False


class DecoderBlock(nn.Module):
    config: LMConfig

    @nn.compact
    def __call__(self, x, mask):
        y = nn.MultiHeadDotProductAttention(2, deterministic=self.config.deterministic)(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dropout(0.1)(y, deterministic=self.config.deterministic)
        kernel_init = nn.with_partitioning(nn.initializers.xavier_uniform(), (None, "mlp"))
        return x + nn.Dense(self.config.width)(nn.gelu(nn.Dense(16, kernel_init=kernel_init)(nn.LayerNorm()(x)))), None


class LanguageModel(nn.Module):
    config: LMConfig

    @nn.compact
    def __call__(self, inputs):
        config = self.config
        embed = nn.Embed(config.vocabulary, config.width)
        x = embed(jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1])  # shifted to the right
        x = x + self.param("positions", nn.initializers.normal(0.02), (inputs.shape[1], config.width))
        layers = nn.scan(
            nn.remat(DecoderBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=config.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(config, name="decoder")(x, nn.make_causal_mask(inputs))
        return embed.attend(nn.LayerNorm()(x))


def glue_language_model():
    class Glue(nn.Module):
        @nn.compact
        def __call__(self, inputs, train: bool = False):
            return LanguageModel(LMConfig(deterministic=not train), name="model")(inputs)

    def loss(logits, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["inputs"])
        return {"loss": losses.mean(axis=1)}

    return LinenModel(Glue(), loss, inputs="inputs"), TOKENS


# --- Variational autoencoders: with a stream for noise, losses from several outputs, and a loss as a variable. ---


class Autoencoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(8)(x.reshape(x.shape[0], -1)))
        mean, logvar = nn.Dense(2)(h), nn.Dense(2)(h)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(self.make_rng("noise"), mean.shape)
        return nn.Dense(64)(nn.relu(nn.Dense(8)(z))), mean, logvar


def glue_autoencoder():
    def loss(outputs, batch):
        logits, mean, logvar = outputs
        target = batch["image"].reshape(logits.shape)
        kl = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), axis=-1)
        return {"bce_loss": optax.sigmoid_binary_cross_entropy(logits, target).sum(-1), "kl_loss": kl}

    return LinenModel(Autoencoder(), loss, rngs=("noise",), predict_rngs=("noise",)), IMAGES


class Loss(nnx.Variable):
    """The kind of variables that hold a loss."""


class NnxEncoder(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.mean, self.std = (nnx.Linear(n, m, rngs=rngs) for n, m in ((64, 8), (8, 2), (8, 2)))
        self.rngs = rngs

    def __call__(self, x):
        h = nnx.relu(self.linear(x.reshape(x.shape[0], -1)))
        mean, std = self.mean(h), jnp.exp(self.std(h))
        self.kl_loss = Loss(jnp.mean(0.5 * jnp.mean(-jnp.log(std**2) - 1.0 + std**2 + mean**2, axis=-1)))
        return mean + std * self.rngs.noise.normal(mean.shape)


class NnxAutoencoder(nnx.Module):
    def __init__(self, rngs):
        self.encoder, self.decoder = NnxEncoder(rngs), nnx.Linear(2, 64, rngs=rngs)

    def __call__(self, x):
        return self.decoder(self.encoder(x)).reshape(x.shape)


def glue_nnx_autoencoder():
    def loss(logits, batch):
        return {"bce_loss": optax.sigmoid_binary_cross_entropy(logits, batch["image"])}

    return NnxModel(NnxAutoencoder, loss, sown_losses={"Loss": 0.1}), IMAGES


# --- An NNX network that scans over its layers. ---


class ScanBlock(nnx.Module):
    def __init__(self, dim, *, rngs):
        self.linear = nnx.Linear(dim, dim, rngs=rngs)
        self.norm = nnx.BatchNorm(dim, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return jax.nn.gelu(self.dropout(self.norm(self.linear(x))))


class ScanMLP(nnx.Module):
    def __init__(self, dim, *, depth, rngs):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(axis_size=depth)
        def create_block(rngs):
            return ScanBlock(dim, rngs=rngs)

        self.layers = create_block(rngs)

    def __call__(self, x):
        @nnx.scan
        def apply(x, block):
            return block(x), None

        return apply(x, self.layers)[0]


def glue_scan():
    return NnxModel(ScanMLP(6, depth=3, rngs=nnx.Rngs(0)), CrossEntropy()), VECTORS


def glue_scan_class():
    return NnxModel(lambda rngs: ScanMLP(6, depth=3, rngs=rngs), CrossEntropy()), VECTORS


GLUE = [glue_digits, glue_language_model, glue_autoencoder, glue_nnx_autoencoder, glue_scan]


def make_runner(glue, work_dir, **changes: Any):
    model, dataset = glue()
    arguments = dict(
        train_dataloader=dict(batch_size=8, dataset=dataset),
        train_cfg=dict(by_epoch=False, max_iters=6),
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.02)),
        val_dataloader=dict(batch_size=8, dataset=dataset),
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=lambda predictions, batch: predictions_size(predictions)),
        randomness=dict(seed=0),
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=1)),
    )
    return build_runner(work_dir, model, **{**arguments, **changes})


def predictions_size(predictions):
    return sum(jnp.square(leaf).reshape(leaf.shape[0], -1).mean(1) for leaf in jax.tree.leaves(predictions))


@pytest.mark.parametrize("glue", GLUE)
def test_model_trains_with_ten_lines_of_glue(glue, tmp_path):
    lines = [line for line in inspect.getsource(glue).splitlines() if line.strip()]
    assert len(lines) <= 10
    runner = make_runner(glue, tmp_path)
    runner.train()
    losses = runner.message_hub.get_scalar("train/loss").data[0]
    assert len(losses) == 6
    assert np.mean(losses[-2:]) < np.mean(losses[:2])
    assert runner.iter == 6
    assert len(runner.validations) == 1


@pytest.mark.parametrize("glue", [glue_scan_class, glue_digits])
def test_a_resumed_run_of_random_streams_equals_an_uninterrupted_one(glue, tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", interval=3, by_epoch=False), logger=None)
    changes = dict(val_cfg=None, val_dataloader=None, val_evaluator=None, default_hooks=hooks)
    whole = make_runner(glue, tmp_path / "whole", **changes).train()
    resumed = make_runner(glue, tmp_path / "rest", **changes, resume=tmp_path / "whole" / "iter_3").train()
    assert int(resumed.step) == 6
    jax.tree.map(
        np.testing.assert_array_equal, (whole.params, whole.model_state), (resumed.params, resumed.model_state)
    )


def test_stacked_layers_train_on_several_replicas_in_low_precision(tmp_path):
    changes = dict(val_cfg=None, val_dataloader=None, val_evaluator=None, precision="bfloat16")
    runner = make_runner(glue_scan_class, tmp_path, parallel=dict(type="DataParallel", devices=2), **changes)
    state = runner.train()
    mean = state.model_state["layers"]["norm"]["mean"]
    assert (mean.shape, mean.dtype) == ((2, 3, 6), jnp.float32)
    assert not np.allclose(mean[0], mean[1])  # each replica has its own examples and masks
    assert runner.module()(np.ones((2, 6), np.float32)).shape == (2, 6)
