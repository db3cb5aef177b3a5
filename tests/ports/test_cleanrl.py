"""https://github.com/vwxyzjn/cleanrl, cleanrl/td3_continuous_action_jax.py: two critics, a delayed actor, and targets."""

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

STEPS, FREQUENCY, TAU = 20, 2, 0.005


class QNetwork(nn.Module):
    @nn.compact
    def __call__(self, x, a):
        x = nn.relu(nn.Dense(16)(jnp.concatenate([x, a], -1)))
        return nn.Dense(1)(nn.relu(nn.Dense(16)(x)))


class Actor(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(2)(nn.relu(nn.Dense(16)(x))))


class TrainState(train_state.TrainState):
    target_params: flax.core.FrozenDict


def next_q(targets, batch, noise_key):
    """Return the value of the next states, from the target networks with clipped noise on the action."""
    noise = jnp.clip(0.2 * jax.random.normal(noise_key, batch["actions"][0].shape), -0.5, 0.5)
    actions = jnp.clip(Actor().apply(targets["actor"], batch["next_observations"]) + noise, -1, 1)
    values = [QNetwork().apply(targets[name], batch["next_observations"], actions) for name in ("qf1", "qf2")]
    return batch["rewards"] + (1 - batch["dones"]) * 0.99 * jnp.minimum(*values).reshape(-1)


def q_loss(params, batch, target):
    return ((QNetwork().apply(params, batch["observations"], batch["actions"]).squeeze() - target) ** 2).mean()


def actor_loss(params, qf1_params, batch):
    return -QNetwork().apply(qf1_params, batch["observations"], Actor().apply(params, batch["observations"])).mean()


def test_td3(check_port):
    adam = optax.adam(3e-3)

    def own_loop(params, batches, noise_key, key):
        @jax.jit
        def update_critic(actor_state, qf1_state, qf2_state, batch, key):
            key, noise_key = jax.random.split(key)
            targets = dict(actor=actor_state.target_params, qf1=qf1_state.target_params, qf2=qf2_state.target_params)
            target = next_q(targets, batch, noise_key)
            loss1, grads1 = jax.value_and_grad(q_loss)(qf1_state.params, batch, target)
            loss2, grads2 = jax.value_and_grad(q_loss)(qf2_state.params, batch, target)
            states = qf1_state.apply_gradients(grads=grads1), qf2_state.apply_gradients(grads=grads2)
            return states, (loss1, loss2), key

        @jax.jit
        def update_actor(actor_state, qf1_state, qf2_state, batch):
            grads = jax.grad(actor_loss)(actor_state.params, qf1_state.params, batch)
            actor_state = actor_state.apply_gradients(grads=grads)
            return tuple(
                state.replace(target_params=optax.incremental_update(state.params, state.target_params, TAU))
                for state in (actor_state, qf1_state, qf2_state)
            )

        actor_state, qf1_state, qf2_state = (
            TrainState.create(apply_fn=None, params=params[name], target_params=params[name], tx=adam)
            for name in ("actor", "qf1", "qf2")
        )
        losses = []
        for global_step, batch in enumerate(batches, 1):
            (qf1_state, qf2_state), loss, noise_key = update_critic(actor_state, qf1_state, qf2_state, batch, noise_key)
            if global_step % FREQUENCY == 0:
                actor_state, qf1_state, qf2_state = update_actor(actor_state, qf1_state, qf2_state, batch)
            losses.append(loss)
        return losses

    def glue(params, batches, noise_key, **run):
        def train_step(state, batch, ctx):
            (targets, key), losses = state.model_state, {}
            key, noise_key = jax.random.split(key)
            target = next_q(targets, batch, noise_key)
            for name in ("qf1", "qf2"):
                state, losses[name] = ctx.update(state, lambda p, name=name: q_loss(p[name], batch, target), name)
            state = state.replace(model_state=(targets, key))

            def act(state):
                state, _ = ctx.update(state, lambda p: actor_loss(p["actor"], p["qf1"], batch), "actor")
                return state.replace(model_state=(optax.incremental_update(state.params, targets, TAU), key))

            state = jax.lax.cond((state.step + 1) % FREQUENCY == 0, act, lambda state: state, state)
            return state, {**losses["qf1"], **losses["qf2"]}

        model = FunctionalModel(lambda _: (params, (params, noise_key)), train_step=train_step)
        optimizers, cfg = {name: dict(optimizer=adam) for name in params}, dict(by_epoch=False, max_iters=STEPS)
        return Runner(model, train_dataloader=batches, train_cfg=cfg, optim_wrapper=optimizers, **run)

    rng, shape = np.random.default_rng(0), (STEPS, 16)
    data = dict(
        observations=rng.standard_normal((*shape, 3), np.float32),
        next_observations=rng.standard_normal((*shape, 3), np.float32),
        actions=rng.uniform(-1, 1, (*shape, 2)).astype(np.float32),
        rewards=rng.standard_normal(shape, np.float32),
        dones=(rng.random(shape) < 0.1).astype(np.float32),
    )
    batches = [{name: values[i] for name, values in data.items()} for i in range(STEPS)]
    key, *keys = jax.random.split(jax.random.PRNGKey(1), 4)
    example = batches[0]["observations"], batches[0]["actions"]
    params = dict(actor=Actor().init(keys[0], example[0]))
    params |= {name: QNetwork().init(key, *example) for name, key in zip(("qf1", "qf2"), keys[1:], strict=True)}
    check_port(glue, own_loop, params, batches, key, names=("loss_qf1", "loss_qf2"))
