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


# --- meta_learning.ipynb: the gradient of a learning rate through updates, whose state is not differentiated. ---


def test_meta_learning(check_port):
    opt, meta_opt = optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.1), optax.adam(0.03)

    def loss_fn(theta, x, y):
        return optax.l2_loss(y, x * theta)

    def outer_loss(eta, theta, state, samples):
        xs, ys = samples
        state.hyperparams["learning_rate"] = jax.nn.sigmoid(eta)
        for x, y in zip(xs[:-1], ys[:-1], strict=True):
            updates, state = opt.update(jax.grad(loss_fn)(theta, x, y), state)
            theta = optax.apply_updates(theta, updates)
        return loss_fn(theta, xs[-1], ys[-1]), (theta, state)

    def own_loop(eta, theta, batches, key):
        @jax.jit
        def outer_step(eta, theta, meta_state, state, samples):
            (loss, (theta, state)), grad = jax.value_and_grad(outer_loss, has_aux=True)(eta, theta, state, samples)
            meta_updates, meta_state = meta_opt.update(grad, meta_state)
            return optax.apply_updates(eta, meta_updates), theta, meta_state, state, loss

        state, meta_state, losses = opt.init(theta), meta_opt.init(eta), []
        for samples in batches:
            eta, theta, meta_state, state, loss = outer_step(eta, theta, meta_state, state, samples)
            losses.append(loss)
        return losses

    def glue(eta, theta, batches, **run):
        def loss(params, model_state, batch):
            return outer_loss(params, *model_state, batch)

        model, cfg = (
            FunctionalModel(lambda _: (eta, (theta, opt.init(theta))), loss),
            dict(by_epoch=False, max_iters=STEPS),
        )
        return Runner(model, train_dataloader=batches, train_cfg=cfg, optim_wrapper=meta_opt, **run)

    rng = np.random.default_rng(0)
    xs = rng.uniform(0, 10, (STEPS, 8)).astype(np.float32)
    batches = list(zip(xs, 10 * xs + rng.standard_normal(xs.shape, np.float32), strict=True))
    check_port(glue, own_loop, -jnp.log(1 / 0.1 - 1), jax.random.normal(jax.random.PRNGKey(42)), batches)


# --- lbfgs.ipynb: a solver with a line search, which calls the loss. ---


def test_lbfgs(check_port):
    solver = optax.lbfgs(memory_size=5)

    def loss_fn(params, batch):
        x, y = batch
        return jnp.mean((x @ params["w"] - y) ** 2) + 0.1 * jnp.sum(jnp.cosh(params["w"]))

    def own_loop(params, batches, key):
        @jax.jit
        def step(params, state, batch):
            def fun(params):
                return loss_fn(params, batch)

            value, grad = jax.value_and_grad(fun)(params)
            updates, state = solver.update(grad, state, params, value=value, grad=grad, value_fn=fun)
            return optax.apply_updates(params, updates), state, value

        state, losses = solver.init(params), []
        for batch in batches:
            params, state, value = step(params, state, batch)
            losses.append(value)
        return losses

    def glue(params, batches, **run):
        model, cfg = FunctionalModel(lambda _: params, loss_fn), dict(by_epoch=False, max_iters=len(batches))
        return Runner(model, train_dataloader=batches, train_cfg=cfg, optim_wrapper=solver, **run)

    rng = np.random.default_rng(0)
    batches = [(rng.standard_normal((16, 8), np.float32), rng.standard_normal(16, np.float32)) for _ in range(8)]
    check_port(glue, own_loop, {"w": jnp.ones(8)}, batches)


# --- contrib/reduce_on_plateau.ipynb: a transformation that gets the value of the loss. ---


def test_reduce_on_plateau(check_port):
    tx = optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=1, accumulation_size=2, factor=0.5))

    def own_loop(params, batches, key):
        @jax.jit
        def train_step(params, opt_state, batch):
            images, labels = batch
            value, grads = jax.value_and_grad(robust_loss)(params, 0.0, (images / 255.0, labels))
            updates, opt_state = tx.update(grads, opt_state, params, value=value)
            return optax.apply_updates(params, updates), opt_state, value

        opt_state, losses = tx.init(params), []
        for batch in batches:
            params, opt_state, value = train_step(params, opt_state, batch)
            losses.append(value)
        return losses

    def glue(params, batches, **run):
        def loss(params, batch):
            images, labels = batch
            return robust_loss(params, 0.0, (images / 255.0, labels))

        model, cfg = FunctionalModel(lambda _: params, loss), dict(by_epoch=False, max_iters=STEPS)
        return Runner(model, train_dataloader=batches, train_cfg=cfg, optim_wrapper=tx, **run)

    check_port(glue, own_loop, MLP().init(jax.random.PRNGKey(0), jnp.zeros((1, 64)))["params"], images_and_labels(1))
