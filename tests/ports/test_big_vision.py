"""https://github.com/google-research/big_vision, big_vision/train.py: a ViT with mixup and a chain by regexes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jengine import Runner
from jengine.config import paths
from jengine.model import FunctionalModel

pytestmark = pytest.mark.ports

STEPS = 20


class ViT(nn.Module):
    @nn.compact
    def __call__(self, image, train=False):
        x = nn.Conv(16, (4, 4), (4, 4), name="embedding")(image).reshape(len(image), -1, 16)
        x = x + self.param("pos_embedding", nn.initializers.normal(0.25), (1, x.shape[1], 16))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        y = nn.LayerNorm()(x)
        x = x + nn.Dropout(0.1, deterministic=not train)(nn.MultiHeadDotProductAttention(2)(y, y))
        x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        return nn.Dense(10, name="head", kernel_init=nn.initializers.zeros)(nn.LayerNorm()(x).mean(1))


def mixup(rng, images, labels):
    rng, rng_mixup = jax.random.split(rng)
    a = jax.random.uniform(rng_mixup, minval=0.5)  # there from a beta distribution, whose sampling compiles slowly
    b = 1 - a
    return rng, (a * images + b * jnp.roll(images, 1, 0), a * labels + b * jnp.roll(labels, 1, 0))


def make_optimizer():
    def select(params):
        return paths.map_with_path(lambda path, _: re.search("kernel$", path) is not None, params)

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, STEPS)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.95, mu_dtype="bfloat16"),
        optax.add_decayed_weights(0.1, mask=select),
        optax.scale_by_learning_rate(schedule),
    )


def test_train(check_port):
    tx = make_optimizer()

    def own_loop(params, batches, key):
        @jax.jit
        def update_fn(params, opt, rng, batch):
            rng = jax.random.fold_in(rng, optax.tree.get(opt, "ScaleByScheduleState").count)
            rng, (images, labels) = mixup(rng, batch["image"], batch["labels"])
            rng, rng_model = jax.random.split(rng)

            def loss_fn(params):
                logits = ViT().apply({"params": params}, images, train=True, rngs={"dropout": rng_model})
                return optax.sigmoid_binary_cross_entropy(logits, labels).sum(-1).mean()

            loss, grads = jax.value_and_grad(loss_fn)(params)
            updates, opt = tx.update(grads, opt, params)
            return optax.apply_updates(params, updates), opt, loss

        opt, losses = tx.init(params), []
        for batch in batches:
            params, opt, loss = update_fn(params, opt, key, batch)
            losses.append(loss)
        return losses

    def glue(params, batches, **run):
        def loss(params, batch, rng):
            rng, (images, labels) = mixup(rng, batch["image"], batch["labels"])
            rng, rng_model = jax.random.split(rng)
            logits = ViT().apply({"params": params}, images, train=True, rngs={"dropout": rng_model})
            return optax.sigmoid_binary_cross_entropy(logits, labels).sum(-1).mean()

        model, cfg = FunctionalModel(lambda _: params, loss), dict(by_epoch=False, max_iters=STEPS)
        return Runner(model, train_dataloader=batches, train_cfg=cfg, optim_wrapper=tx, **run)

    rng = np.random.default_rng(0)
    batches = [
        dict(image=rng.random((16, 8, 8, 3), np.float32), labels=np.eye(10, dtype=np.float32)[rng.integers(0, 10, 16)])
        for _ in range(STEPS)
    ]
    check_port(glue, own_loop, ViT().init(jax.random.PRNGKey(0), batches[0]["image"])["params"], batches)
