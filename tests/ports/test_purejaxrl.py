"""https://github.com/luchris429/purejaxrl, purejaxrl/ppo.py: rollouts in an environment of JAX within the step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

from jengine import Runner
from jengine.model import FunctionalModel

pytestmark = pytest.mark.ports

UPDATES, ENVS, LENGTH, EPOCHS, MINIBATCHES = 10, 4, 8, 2, 4


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        actor, critic = (nn.tanh(nn.Dense(16)(x)) for _ in range(2))
        return nn.Dense(3)(actor), nn.Dense(1)(critic).squeeze(-1)


class Transition(NamedTuple):
    done: jax.Array
    action: jax.Array
    value: jax.Array
    reward: jax.Array
    log_prob: jax.Array
    obs: jax.Array


def reset(key):
    """Return the state of an environment, in which a mass is pushed towards 0: position and speed."""
    return jax.random.uniform(key, (2,), minval=-1, maxval=1)


def env_step(key, state, action):
    speed = 0.9 * state[1] + 0.2 * (action - 1)
    moved = jnp.stack([state[0] + 0.1 * speed, speed])
    done = jnp.abs(moved[0]) > 1.2
    return jnp.where(done, reset(key), moved), 1 - moved[0] ** 2, done


def rollout(params, env_state, rng):
    def step(carry, _):
        env_state, rng = carry
        rng, action_key, step_key = jax.random.split(rng, 3)
        logits, value = ActorCritic().apply(params, env_state)
        action = jax.random.categorical(action_key, logits)
        log_prob = jnp.take_along_axis(nn.log_softmax(logits), action[:, None], 1)[:, 0]
        new_state, reward, done = jax.vmap(env_step)(jax.random.split(step_key, ENVS), env_state, action)
        return (new_state, rng), Transition(done, action, value, reward, log_prob, env_state)

    return jax.lax.scan(step, (env_state, rng), length=LENGTH)


def estimate_advantages(trajectory, last_value):
    def step(carry, transition):
        gae, next_value = carry
        delta = transition.reward + 0.99 * next_value * (1 - transition.done) - transition.value
        gae = delta + 0.99 * 0.95 * (1 - transition.done) * gae
        return (gae, transition.value), gae

    _, advantages = jax.lax.scan(step, (jnp.zeros_like(last_value), last_value), trajectory, reverse=True)
    return advantages, advantages + trajectory.value


def shuffle(rng, data):
    order = jax.random.permutation(rng, ENVS * LENGTH)
    flat = jax.tree.map(lambda x: x.reshape(ENVS * LENGTH, *x.shape[2:])[order], data)
    return jax.tree.map(lambda x: x.reshape(MINIBATCHES, -1, *x.shape[1:]), flat)


def ppo_loss(params, minibatch):
    trajectory, advantages, targets = minibatch
    logits, value = ActorCritic().apply(params, trajectory.obs)
    log_probs = nn.log_softmax(logits)
    ratio = jnp.exp(jnp.take_along_axis(log_probs, trajectory.action[:, None], 1)[:, 0] - trajectory.log_prob)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    actor = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages).mean()
    clipped = trajectory.value + jnp.clip(value - trajectory.value, -0.2, 0.2)
    critic = 0.5 * jnp.maximum((value - targets) ** 2, (clipped - targets) ** 2).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    return actor + 0.5 * critic - 0.01 * entropy


def experience(params, env_state, rng):
    """Return the carry after a rollout with the current parameters, and what its minibatches are drawn from."""
    (env_state, rng), trajectory = rollout(params, env_state, rng)
    _, last_value = ActorCritic().apply(params, env_state)
    return env_state, rng, (trajectory, *estimate_advantages(trajectory, last_value))


def test_ppo(check_port):
    steps = UPDATES * EPOCHS * MINIBATCHES
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.linear_schedule(3e-3, 0, steps), eps=1e-5))

    def own_loop(params, env_state, rng, key):
        def update_minibatch(train_state, minibatch):
            loss, grads = jax.value_and_grad(ppo_loss)(train_state.params, minibatch)
            return train_state.apply_gradients(grads=grads), loss

        @jax.jit
        def update_step(train_state, env_state, rng):
            env_state, rng, data = experience(train_state.params, env_state, rng)
            for _ in range(EPOCHS):
                rng, order_key = jax.random.split(rng)
                train_state, losses = jax.lax.scan(update_minibatch, train_state, shuffle(order_key, data))
            return train_state, env_state, rng, losses.mean()

        train_state, losses = TrainState.create(apply_fn=None, params=params, tx=tx), []
        for _ in range(UPDATES):
            train_state, env_state, rng, loss = update_step(train_state, env_state, rng)
            losses.append(loss)
        return losses

    def glue(params, env_state, rng, **run):
        def train_step(state, batch, ctx):
            env_state, rng, data = experience(state.params, *state.model_state)
            update = lambda state, minibatch: ctx.update(state, lambda params: ppo_loss(params, minibatch))  # noqa: E731
            for _ in range(EPOCHS):
                rng, order_key = jax.random.split(rng)
                state, metrics = jax.lax.scan(update, state, shuffle(order_key, data))
            return state.replace(model_state=(env_state, rng)), {"loss": metrics["loss"].mean()}

        model = FunctionalModel(lambda _: (params, (env_state, rng)), train_step=train_step)
        data = dict(dataset=[np.zeros(())] * UPDATES, batch_axis=None)  # the data are made in the step
        cfg = dict(by_epoch=False, max_iters=UPDATES)
        return Runner(model, train_dataloader=data, train_cfg=cfg, optim_wrapper=tx, **run)

    rng, init_key, reset_key = jax.random.split(jax.random.PRNGKey(0), 3)
    env_state = jax.vmap(reset)(jax.random.split(reset_key, ENVS))
    check_port(glue, own_loop, ActorCritic().init(init_key, env_state), env_state, rng)
