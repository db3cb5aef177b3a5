"""Scripts of https://github.com/google-deepmind/optax, examples/."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from optax import contrib

from jengine import Runner
from jengine.model import FunctionalModel

pytestmark = pytest.mark.ports

STEPS = 20


def images_and_labels(channels):
    rng = np.random.default_rng(0)
    shape = (16, 8, 8, channels)
    return [(rng.integers(0, 256, shape, np.uint8), rng.integers(0, 10, 16, np.int32)) for _ in range(STEPS)]


# --- adversarial_training.ipynb: projected gradient descent on the images, within the training step. ---


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(32)(x.reshape(len(x), -1))))


def robust_loss(params, l2, data):
    inputs, labels = data
    logits = MLP().apply({"params": params}, inputs)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss + 0.5 * l2 * optax.tree.norm(params, squared=True)


def attack(params, images, labels, epsilon=0.1, steps=4):
    def move(change, _):
        grad = jax.grad(lambda change: robust_loss(params, 0.0, (images + change, labels)))(change)
        return jnp.clip(change + 2 * epsilon / steps * jnp.sign(grad), -epsilon, epsilon), None

    change, _ = jax.lax.scan(move, jnp.zeros_like(images), length=steps)
    return jnp.clip(images + change, 0, 1)


def test_adversarial_training(check_port):
    optimizer = optax.adam(1e-3)

    def own_loop(params, batches, key):
        @jax.jit
        def train_step(params, opt_state, batch):
            images, labels = batch
            images = attack(params, images.astype(jnp.float32) / 255, labels)
            loss, grads = jax.value_and_grad(robust_loss)(params, 1e-4, (images, labels))
            updates, opt_state = optimizer.update(grads, opt_state)
            return optax.apply_updates(params, updates), opt_state, loss

        opt_state, losses = optimizer.init(params), []
        for batch in batches:
            params, opt_state, loss = train_step(params, opt_state, batch)
            losses.append(loss)
        return losses

    def glue(params, batches, **run):
        def loss(params, batch):
            images, labels = batch
            images = attack(jax.lax.stop_gradient(params), images.astype(jnp.float32) / 255, labels)
            return robust_loss(params, 1e-4, (images, labels))

        model, cfg = FunctionalModel(lambda _: params, loss), dict(by_epoch=False, max_iters=STEPS)
        return Runner(model, train_dataloader=batches, train_cfg=cfg, optim_wrapper=optimizer, **run)

    check_port(glue, own_loop, MLP().init(jax.random.PRNGKey(0), jnp.zeros((1, 64)))["params"], images_and_labels(1))


# --- cifar10_resnet.ipynb: batch statistics, L2 in the loss, Nesterov momentum with a warm-up. ---


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = x + nn.Conv(8, (3, 3), use_bias=False)(y)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10)(x.mean((1, 2)))


def resnet_loss(params, batch_stats, data):
    images, labels = data
    variables = {"params": params, "batch_stats": batch_stats}
    logits, updates = ResNet().apply(variables, images / 255.0, train=True, mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss + 0.5e-4 * optax.tree.norm(params, squared=True), updates["batch_stats"]


def test_cifar10_resnet(check_port):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.12, 5, STEPS)
    solver = optax.sgd(schedule, momentum=0.9, nesterov=True)

    def own_loop(params, batch_stats, batches, key):
        @jax.jit
        def train_step(params, batch_stats, opt_state, batch):
            (loss, batch_stats), grads = jax.value_and_grad(resnet_loss, has_aux=True)(params, batch_stats, batch)
            updates, opt_state = solver.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), batch_stats, opt_state, loss

        opt_state, losses = solver.init(params), []
        for batch in batches:
            params, batch_stats, opt_state, loss = train_step(params, batch_stats, opt_state, batch)
            losses.append(loss)
        return losses

    def glue(params, batch_stats, batches, **run):
        def loss(params, model_state, batch):
            return resnet_loss(params, model_state, batch)

        model, cfg = FunctionalModel(lambda _: (params, batch_stats), loss), dict(by_epoch=False, max_iters=STEPS)
        return Runner(model, train_dataloader=batches, train_cfg=cfg, optim_wrapper=solver, **run)

    variables = ResNet().init(jax.random.PRNGKey(0), jnp.zeros((1, 8, 8, 3)), train=False)
    check_port(glue, own_loop, variables["params"], variables["batch_stats"], images_and_labels(3))


# --- contrib/sam.ipynb: sharpness-aware minimization in transparent mode, whose iterations alternate. ---


def test_sam(check_port):
    solver = contrib.sam(optax.sgd(0.02, momentum=0.9), optax.chain(contrib.normalize(), optax.sgd(0.1)), sync_period=2)

    def loss_fn(params, data):
        images, labels = data
        return robust_loss(params, 0.0, (images / 255.0, labels))

    def own_loop(params, batches, key):
        @jax.jit
        def step(params, opt_state, batch):
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            updates, opt_state = solver.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        opt_state, losses = solver.init(params), []
        for batch in batches:
            params, opt_state, loss = step(params, opt_state, batch)
            losses.append(loss)
        return losses

    def glue(params, batches, **run):
        model, cfg = FunctionalModel(lambda _: params, loss_fn), dict(by_epoch=False, max_iters=STEPS)
        return Runner(model, train_dataloader=batches, train_cfg=cfg, optim_wrapper=solver, **run)

    check_port(glue, own_loop, MLP().init(jax.random.PRNGKey(0), jnp.zeros((1, 64)))["params"], images_and_labels(1))
