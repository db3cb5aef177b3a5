"""https://github.com/luchris429/purejaxrl, purejaxrl/ppo.py: rollouts in an environment of JAX within the step.

The network, the environment and the loss are those of examples/ppo.py.
"""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from jengine import Runner
from jengine.model import FunctionalModel

pytestmark = pytest.mark.ports

UPDATES, ENVS, LENGTH = 10, 4, 8


@pytest.fixture(scope="module")
def ppo():
    path = pathlib.Path(__file__).parents[2] / "examples" / "ppo.py"
    spec = importlib.util.spec_from_file_location("ppo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ppo(check_port, ppo):
    steps = UPDATES * ppo.EPOCHS * ppo.MINIBATCHES
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.linear_schedule(3e-3, 0, steps), eps=1e-5))

    def loss_fn(params, minibatch):
        return sum(ppo.ppo_loss(params, minibatch).values())

    def experience(params, envs, rng):
        """Return the carry after a rollout with the current parameters, and what its minibatches are drawn from."""
        rng, rollout_key = jax.random.split(rng)
        envs, trajectory = ppo.rollout(params, envs, rollout_key, LENGTH)
        return envs, rng, ppo.make_examples(params, trajectory, envs["obs"])

    def own_loop(params, envs, rng, key):
        def update_minibatch(train_state, minibatch):
            loss, grads = jax.value_and_grad(loss_fn)(train_state.params, minibatch)
            return train_state.apply_gradients(grads=grads), loss

        @jax.jit
        def update_step(train_state, envs, rng):
            envs, rng, examples = experience(train_state.params, envs, rng)
            for _ in range(ppo.EPOCHS):
                rng, order_key = jax.random.split(rng)
                train_state, losses = jax.lax.scan(update_minibatch, train_state, ppo.shuffle(order_key, examples))
            return train_state, envs, rng, losses.mean()

        train_state, losses = TrainState.create(apply_fn=None, params=params, tx=tx), []
        for _ in range(UPDATES):
            train_state, envs, rng, loss = update_step(train_state, envs, rng)
            losses.append(loss)
        return losses

    def glue(params, envs, rng, **run):
        def train_step(state, batch, ctx):
            envs, rng, examples = experience(state.params, *state.model_state)
            update = lambda state, minibatch: ctx.update(state, lambda params: loss_fn(params, minibatch))  # noqa: E731
            for _ in range(ppo.EPOCHS):
                rng, order_key = jax.random.split(rng)
                state, metrics = jax.lax.scan(update, state, ppo.shuffle(order_key, examples))
            return state.replace(model_state=(envs, rng)), {"loss": metrics["loss"].mean()}

        model = FunctionalModel(lambda _: (params, (envs, rng)), train_step=train_step)
        data = dict(dataset=[np.zeros(())] * UPDATES, batch_axis=None)  # the data are made in the step
        cfg = dict(by_epoch=False, max_iters=UPDATES)
        return Runner(model, train_dataloader=data, train_cfg=cfg, optim_wrapper=tx, **run)

    rng, init_key, reset_key = jax.random.split(jax.random.PRNGKey(0), 3)
    envs = ppo.reset(jax.random.uniform(reset_key, (ENVS, 4), minval=-0.05, maxval=0.05), jnp)
    check_port(glue, own_loop, ppo.init_params(init_key), envs, rng)
