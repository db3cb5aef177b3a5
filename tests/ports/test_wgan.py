"""https://github.com/igul222/improved_wgan_training, gan_mnist.py, in JAX: several critic updates, each with new data."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jengine import Runner
from jengine.model import FunctionalModel

pytestmark = pytest.mark.ports

STEPS, CRITIC_ITERS = 6, 3


class MLP(nn.Module):
    size: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.size)(nn.tanh(nn.Dense(16)(x)))


def critic(params, x):
    return MLP(1).apply(params, x)[:, 0]


def generate(params, rng, count):
    return MLP(6).apply(params, jax.random.normal(rng, (count, 4)))


def critic_cost(critic_params, generator_params, real, rng):
    noise_key, alpha_key = jax.random.split(rng)
    fake = generate(generator_params, noise_key, len(real))
    between = real + jax.random.uniform(alpha_key, (len(real), 1)) * (fake - real)
    slopes = jnp.linalg.norm(jax.vmap(jax.grad(lambda x: critic(critic_params, x[None])[0]))(between), axis=1)
    return critic(critic_params, fake).mean() - critic(critic_params, real).mean() + 10 * ((slopes - 1) ** 2).mean()


def generator_cost(generator_params, critic_params, size, rng):
    return -critic(critic_params, generate(generator_params, rng, size)).mean()


def test_gan_mnist(check_port):
    adam = optax.adam(1e-3, b1=0.5, b2=0.9)

    def own_loop(params, batches, rng, key):
        @jax.jit
        def train_critic(params, opt_state, real, rng):
            rng, subkey = jax.random.split(rng)
            cost, grads = jax.value_and_grad(critic_cost)(params["critic"], params["generator"], real, subkey)
            updates, opt_state = adam.update(grads, opt_state)
            return {**params, "critic": optax.apply_updates(params["critic"], updates)}, opt_state, rng, cost

        @jax.jit
        def train_generator(params, opt_state, rng):
            rng, subkey = jax.random.split(rng)
            cost, grads = jax.value_and_grad(generator_cost)(params["generator"], params["critic"], 8, subkey)
            updates, opt_state = adam.update(grads, opt_state)
            return {**params, "generator": optax.apply_updates(params["generator"], updates)}, opt_state, rng, cost

        critic_state, generator_state = adam.init(params["critic"]), adam.init(params["generator"])
        data, losses = iter(batches), []
        for _ in range(STEPS):
            for _ in range(CRITIC_ITERS):
                params, critic_state, rng, cost = train_critic(params, critic_state, next(data), rng)
            params, generator_state, rng, generator_loss = train_generator(params, generator_state, rng)
            losses.append((cost, generator_loss))
        return losses

    def glue(params, batches, rng, **run):
        def critic_loss(params, model_state, batch):
            rng, subkey = jax.random.split(model_state["rng"])
            return critic_cost(params["critic"], params["generator"], batch, subkey), {"rng": rng}

        def generator_loss(params, model_state, batch):
            rng, subkey = jax.random.split(model_state["rng"])
            return generator_cost(params["generator"], params["critic"], len(batch), subkey), {"rng": rng}

        losses, optimizers = dict(critic=critic_loss, generator=generator_loss), dict(critic=adam, generator=adam)
        phases = [dict(optimizer="critic", steps=CRITIC_ITERS, batches="each"), dict(optimizer="generator")]
        model = FunctionalModel(lambda _: (params, {"rng": rng}), losses)
        cfg = dict(by_epoch=False, max_iters=STEPS, phases=phases)
        return Runner(model, train_dataloader=batches, train_cfg=cfg, optim_wrapper=optimizers, **run)

    critic_key, generator_key, rng = jax.random.split(jax.random.PRNGKey(0), 3)
    params = dict(
        critic=MLP(1).init(critic_key, np.ones((1, 6))), generator=MLP(6).init(generator_key, np.ones((1, 4)))
    )
    batches = list(np.random.default_rng(0).standard_normal((STEPS * CRITIC_ITERS, 8, 6), np.float32))
    check_port(glue, own_loop, params, batches, rng, names=("loss_critic", "loss_generator"))
