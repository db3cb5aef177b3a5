"""Scripts of https://github.com/google/flax, examples/."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state

from jengine import Runner
from jengine.model import FunctionalModel, LinenModel, NnxModel

pytestmark = pytest.mark.ports

STEPS = 20


def images_and_labels(size=8, batch=16):
    rng = np.random.default_rng(0)
    return [
        dict(image=rng.random((batch, size, size, 1), np.float32), label=rng.integers(0, 10, batch, np.int32))
        for _ in range(STEPS)
    ]


# --- examples/mnist/train.py: a CNN with a TrainState. ---


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (8, 16):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(32)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def test_mnist(check_port):
    tx = optax.sgd(0.1, momentum=0.9)

    def own_loop(params, batches, key):
        @jax.jit
        def train_step(state, batch):
            def loss_fn(params):
                logits = state.apply_fn({"params": params}, batch["image"])
                one_hot = jax.nn.one_hot(batch["label"], 10)
                return optax.softmax_cross_entropy(logits, one_hot).mean()

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            return state.apply_gradients(grads=grads), loss

        state, losses = train_state.TrainState.create(apply_fn=CNN().apply, params=params, tx=tx), []
        for batch in batches:
            state, loss = train_step(state, batch)
            losses.append(loss)
        return losses

    def glue(params, batches, **run):
        def loss(logits, batch):
            return optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch["label"], 10)).mean()

        cfg = dict(by_epoch=False, max_iters=STEPS)
        return Runner(
            LinenModel(CNN(), loss), train_dataloader=batches, train_cfg=cfg, optim_wrapper=tx, load_from=params, **run
        )

    batches = images_and_labels()
    check_port(glue, own_loop, CNN().init(jax.random.key(0), batches[0]["image"])["params"], batches)


# --- examples/vae/train.py: a key for each step, which the loop splits off. ---


class VAE(nn.Module):
    latents: int = 4

    @nn.compact
    def __call__(self, x, z_rng):
        hidden = nn.relu(nn.Dense(32, name="encoder")(x))
        mean, logvar = nn.Dense(self.latents, name="mean")(hidden), nn.Dense(self.latents, name="logvar")(hidden)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(z_rng, logvar.shape)
        hidden = nn.relu(nn.Dense(32, name="decoder")(z))
        return nn.Dense(x.shape[-1], name="pixels")(hidden), mean, logvar


def vae_loss(params, batch, z_rng):
    logits, mean, logvar = VAE().apply({"params": params}, batch, z_rng)
    bce = optax.sigmoid_binary_cross_entropy(logits, batch).sum(-1).mean()
    kld = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), -1).mean()
    return bce + kld


def test_vae(check_port):
    tx = optax.adam(1e-3)

    def own_loop(params, batches, rng, key):
        @jax.jit
        def train_step(state, batch, z_rng):
            loss, grads = jax.value_and_grad(vae_loss)(state.params, batch, z_rng)
            return state.apply_gradients(grads=grads), loss

        state, losses = train_state.TrainState.create(apply_fn=VAE().apply, params=params, tx=tx), []
        for batch in batches:
            rng, z_rng = jax.random.split(rng)
            state, loss = train_step(state, batch, z_rng)
            losses.append(loss)
        return losses

    def glue(params, batches, rng, **run):
        def loss(params, model_state, batch):
            rng, z_rng = jax.random.split(model_state["rng"])
            return vae_loss(params, batch, z_rng), {"rng": rng}

        model = FunctionalModel(lambda _: (params, {"rng": rng}), loss)
        cfg = dict(by_epoch=False, max_iters=STEPS)
        return Runner(model, train_dataloader=batches, train_cfg=cfg, optim_wrapper=tx, **run)

    batches = [x["image"].reshape(len(x["image"]), -1).round() for x in images_and_labels()]
    rng, init_rng = jax.random.split(jax.random.PRNGKey(0))
    check_port(glue, own_loop, VAE().init(init_rng, batches[0], rng)["params"], batches, rng)


# --- examples/lm1b/train.py: a decoder with dropout, padded sequences, label smoothing and a schedule. ---


class Decoder(nn.Module):
    deterministic: bool = False

    @nn.compact
    def __call__(self, tokens):
        shifted = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        x = nn.Embed(32, 16)(shifted) + self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], 16))
        mask = nn.combine_masks(nn.make_attention_mask(shifted > 0, shifted > 0), nn.make_causal_mask(tokens))
        for _ in range(2):
            y = nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=self.deterministic)(
                nn.LayerNorm()(x), mask=mask
            )
            x = x + nn.Dropout(0.1, deterministic=self.deterministic)(y)
            x = x + nn.Dense(16)(nn.relu(nn.Dense(32)(nn.LayerNorm()(x))))
        return nn.Dense(32)(nn.LayerNorm()(x))


def weighted_cross_entropy(logits, targets, weights, smoothing=0.1):
    soft = optax.smooth_labels(jax.nn.one_hot(targets, 32), smoothing)
    return (optax.softmax_cross_entropy(logits, soft) * weights).sum(), weights.sum()


def test_lm1b(check_port):
    schedule = optax.join_schedules(
        [optax.linear_schedule(0, 0.01, 5), lambda count: 0.01 * (count + 5) ** -0.5 * 5**0.5], [5]
    )
    tx = optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)

    def own_loop(params, batches, key):
        @functools.partial(jax.jit, donate_argnums=0)
        def train_step(state, batch, dropout_rng):
            inputs = batch["inputs"]
            weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)
            dropout_rng = jax.random.fold_in(dropout_rng, state.step)

            def loss_fn(params):
                logits = Decoder().apply({"params": params}, inputs, rngs={"dropout": dropout_rng})
                loss, weight_sum = weighted_cross_entropy(logits, inputs, weights)
                return loss / weight_sum

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            return state.apply_gradients(grads=grads), loss

        params = jax.tree.map(jnp.copy, params)
        state, losses = train_state.TrainState.create(apply_fn=Decoder().apply, params=params, tx=tx), []
        for batch in batches:
            state, loss = train_step(state, batch, key)
            losses.append(loss)
        return losses

    def glue(params, batches, **run):
        def loss(params, batch, rng):
            logits = Decoder().apply({"params": params}, batch["inputs"], rngs={"dropout": rng})
            weights = jnp.where(batch["inputs"] > 0, 1, 0).astype(jnp.float32)
            return {"loss": weighted_cross_entropy(logits, batch["inputs"], weights)}

        model, cfg = FunctionalModel(lambda _: params, loss), dict(by_epoch=False, max_iters=STEPS)
        return Runner(model, train_dataloader=batches, train_cfg=cfg, optim_wrapper=tx, **run)

    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 13, (STEPS, 8, 1))
    tokens = np.where(np.arange(12) < lengths, rng.integers(1, 32, (STEPS, 8, 12)), 0).astype(np.int32)
    batches = [dict(inputs=batch) for batch in tokens]
    check_port(glue, own_loop, Decoder(deterministic=True).init(jax.random.key(1), tokens[0])["params"], batches)


# --- docs_nnx/mnist_tutorial.md: an NNX module with batch norm, and an nnx.Optimizer. ---


class NnxCNN(nnx.Module):
    def __init__(self, *, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.linear1 = nnx.Linear(128, 32, rngs=rngs)
        self.linear2 = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
        return self.linear2(nnx.relu(self.linear1(x.reshape(len(x), -1))))


def test_nnx_mnist(check_port):
    tx = optax.adamw(5e-3, 0.9)

    def own_loop(batches, key):
        def loss_fn(model, batch):
            logits = model(batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        @nnx.jit
        def train_step(model, optimizer, batch):
            loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
            optimizer.update(model, grads)
            return loss

        model = NnxCNN(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        model.train()
        return [train_step(model, optimizer, batch) for batch in batches]

    def glue(batches, **run):
        def loss(logits, batch):
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        model, cfg = NnxModel(NnxCNN(rngs=nnx.Rngs(0)), loss), dict(by_epoch=False, max_iters=STEPS)
        return Runner(model, train_dataloader=batches, train_cfg=cfg, optim_wrapper=tx, **run)

    check_port(glue, own_loop, images_and_labels())
