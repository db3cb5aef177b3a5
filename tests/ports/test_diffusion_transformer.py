"""https://github.com/kvfrans/jax-diffusion-transformer, train_diffusion.py: a DiT with dropped labels and an average."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state

from jengine import Runner
from jengine.model import FunctionalModel

pytestmark = pytest.mark.ports

STEPS, TIMES = 20, 50


class DiT(nn.Module):
    @nn.compact
    def __call__(self, x, t, y, train=False):
        if train:
            y = jnp.where(jax.random.bernoulli(self.make_rng("label_dropout"), 0.1, y.shape), 10, y)
        c = nn.Dense(16)(jnp.sin(t[:, None] * jnp.exp(-jnp.arange(8.0)))) + nn.Embed(11, 16)(y)
        h = nn.Conv(16, (2, 2), (2, 2))(x).reshape(len(x), -1, 16)
        shift, scale, gate = jnp.split(
            nn.Dense(48, kernel_init=nn.initializers.normal(0.02))(nn.silu(c))[:, None], 3, -1
        )
        z = nn.LayerNorm(use_scale=False, use_bias=False)(h) * (1 + scale) + shift
        h = h + gate * nn.MultiHeadDotProductAttention(2, use_bias=False)(z, z)
        h = nn.ConvTranspose(1, (2, 2), (2, 2))(h.reshape(len(x), x.shape[1] // 2, -1, 16))
        return h


def diffusion_loss(params, images, labels, label_key, time_key, noise_key):
    t = jax.random.randint(time_key, (len(images),), 0, TIMES)
    eps = jax.random.normal(noise_key, images.shape)
    alpha = jnp.cumprod(1 - jnp.linspace(1e-4, 0.1, TIMES))[t][:, None, None, None]
    x_t = jnp.sqrt(alpha) * images + jnp.sqrt(1 - alpha) * eps
    prediction = DiT().apply({"params": params}, x_t, t, labels, train=True, rngs={"label_dropout": label_key})
    return jnp.mean((prediction - eps) ** 2)


class Trainer(flax.struct.PyTreeNode):
    rng: Any
    model: train_state.TrainState
    average: Any

    @jax.jit
    def update(self, images, labels):
        rng, *keys = jax.random.split(self.rng, 4)
        loss, grads = jax.value_and_grad(diffusion_loss)(self.model.params, images, labels, *keys)
        # the parameters before the update
        average = jax.tree.map(lambda p, a: 0.1 * p + 0.9 * a, self.model.params, self.average)
        return self.replace(rng=rng, model=self.model.apply_gradients(grads=grads), average=average), loss


def test_train_diffusion(check_port):
    tx, averages = optax.adam(1e-3, b1=0.9, b2=0.99), []

    def own_loop(params, batches, rng, key):
        trainer = Trainer(rng, train_state.TrainState.create(apply_fn=DiT().apply, params=params, tx=tx), params)
        losses = []
        for images, labels in batches:
            trainer, loss = trainer.update(images, labels)
            losses.append(loss)
        averages.append(trainer.average)
        return losses

    def glue(params, batches, rng, **run):
        def loss(params, model_state, batch):
            rng, *keys = jax.random.split(model_state["rng"], 4)
            return diffusion_loss(params, *batch, *keys), {"rng": rng}

        model, cfg = FunctionalModel(lambda _: (params, {"rng": rng}), loss), dict(by_epoch=False, max_iters=STEPS)
        ema = dict(type="EMAHook", momentum=0.1, before_update=True)
        return Runner(model, train_dataloader=batches, train_cfg=cfg, optim_wrapper=tx, custom_hooks=[ema], **run)

    data = np.random.default_rng(0)
    batches = [
        (data.standard_normal((8, 8, 8, 1), np.float32), data.integers(0, 10, 8, np.int32)) for _ in range(STEPS)
    ]
    rng, init_key = jax.random.split(jax.random.PRNGKey(0))
    params = DiT().init(init_key, batches[0][0], jnp.zeros(8), batches[0][1])["params"]
    runner = check_port(glue, own_loop, params, batches, rng)
    average = runner.state.hook_state["EMAHook"].params
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), average, averages[0])
