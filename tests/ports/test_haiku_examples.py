"""https://github.com/google-deepmind/dm-haiku, examples/mnist.py: an MLP with L2 in the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine import Runner
from jengine.model import FunctionalModel

pytestmark = pytest.mark.ports

STEPS = 20


def test_mnist(check_port):
    hk = pytest.importorskip("haiku")

    def net_fn(batch):
        x = batch["image"].astype(jnp.float32) / 255.0
        return hk.nets.MLP([32, 16, 10])(hk.Flatten()(x))

    net, opt = hk.without_apply_rng(hk.transform(net_fn)), optax.adam(1e-3)

    def loss(params, batch):
        labels = jax.nn.one_hot(batch["label"], 10)
        l2_loss = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
        return -jnp.sum(labels * jax.nn.log_softmax(net.apply(params, batch))) / len(labels) + 1e-4 * l2_loss

    def own_loop(params, batches, key):
        @jax.jit
        def update(params, opt_state, batch):
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, opt_state = opt.update(grads, opt_state)
            return optax.apply_updates(params, updates), opt_state, value

        opt_state, losses = opt.init(params), []
        for batch in batches:
            params, opt_state, value = update(params, opt_state, batch)
            losses.append(value)
        return losses

    def glue(params, batches, **run):
        model, cfg = FunctionalModel(lambda _: params, loss), dict(by_epoch=False, max_iters=STEPS)
        return Runner(model, train_dataloader=batches, train_cfg=cfg, optim_wrapper=opt, **run)

    rng = np.random.default_rng(0)
    batches = [
        dict(image=rng.integers(0, 256, (16, 8, 8, 1), np.uint8), label=rng.integers(0, 10, 16, np.int32))
        for _ in range(STEPS)
    ]
    check_port(glue, own_loop, net.init(jax.random.PRNGKey(42), batches[0]), batches)
