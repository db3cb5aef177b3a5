"""Scripts of https://github.com/patrick-kidger/equinox, docs/examples/."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from jengine import Runner
from jengine.model import FunctionalModel

pytestmark = pytest.mark.ports

STEPS = 20

eqx = pytest.importorskip("equinox")


# --- score_based_diffusion.ipynb: a mixer on noisy images, times of low discrepancy, and a chain of keys. ---


class Mixer(eqx.Module):
    conv_in: eqx.nn.Conv2d
    conv_out: eqx.nn.ConvTranspose2d
    patch_mixer: eqx.nn.MLP
    hidden_mixer: eqx.nn.MLP
    norm: eqx.nn.LayerNorm
    t1: float

    def __init__(self, t1, *, key):
        keys = jr.split(key, 4)
        self.conv_in = eqx.nn.Conv2d(2, 8, 2, stride=2, key=keys[0])
        self.conv_out = eqx.nn.ConvTranspose2d(8, 1, 2, stride=2, key=keys[1])
        self.patch_mixer = eqx.nn.MLP(16, 16, 16, depth=1, key=keys[2])
        self.hidden_mixer = eqx.nn.MLP(8, 8, 16, depth=1, key=keys[3])
        self.norm = eqx.nn.LayerNorm((8, 16))
        self.t1 = t1

    def __call__(self, t, y):
        y = self.conv_in(jnp.concatenate([y, jnp.full((1, *y.shape[1:]), t / self.t1)]))
        shape = y.shape
        y = y.reshape(shape[0], -1)
        y = y + jax.vmap(self.patch_mixer)(self.norm(y))
        y = y + jax.vmap(self.hidden_mixer)(self.norm(y).T).T
        return self.conv_out(y.reshape(shape))


def single_loss(model, data, t, key):
    std = jnp.sqrt(jnp.maximum(1 - jnp.exp(-t), 1e-5))
    noise = jr.normal(key, data.shape)
    pred = model(t, data * jnp.exp(-0.5 * t) + std * noise)
    return (1 - jnp.exp(-t)) * jnp.mean((pred + noise / std) ** 2)


def batch_loss(model, data, t1, key):
    size = len(data)
    time_key, loss_key = jr.split(key)
    t = jr.uniform(time_key, (size,), maxval=t1 / size) + (t1 / size) * jnp.arange(size)
    return jnp.mean(jax.vmap(single_loss, (None, 0, 0, 0))(model, data, t, jr.split(loss_key, size)))


def test_score_based_diffusion(check_port):
    opt = optax.adabelief(3e-3)

    def own_loop(model, batches, train_key, key):
        @eqx.filter_jit
        def make_step(model, data, key, opt_state):
            loss, grads = eqx.filter_value_and_grad(batch_loss)(model, data, 10.0, key)
            updates, opt_state = opt.update(grads, opt_state)
            return loss, eqx.apply_updates(model, updates), jr.split(key, 1)[0], opt_state

        opt_state, losses = opt.init(eqx.filter(model, eqx.is_inexact_array)), []
        for data in batches:
            loss, model, train_key, opt_state = make_step(model, data, train_key, opt_state)
            losses.append(loss)
        return losses

    def glue(model, batches, train_key, **run):
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def loss(params, model_state, batch):
            key = model_state["key"]
            return batch_loss(eqx.combine(params, static), batch, 10.0, key), {"key": jr.split(key, 1)[0]}

        wrapped = FunctionalModel(lambda _: (params, {"key": train_key}), loss)
        cfg = dict(by_epoch=False, max_iters=STEPS)
        return Runner(wrapped, train_dataloader=batches, train_cfg=cfg, optim_wrapper=opt, **run)

    model_key, train_key = jr.split(jr.PRNGKey(5678))
    batches = list(np.random.default_rng(0).standard_normal((STEPS, 8, 1, 8, 8), np.float32))
    check_port(glue, own_loop, Mixer(10.0, key=model_key), batches, train_key)


# --- train_rnn.ipynb: a GRU over sequences. ---


class RNN(eqx.Module):
    hidden_size: int
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, hidden_size, *, key):
        cell_key, linear_key = jr.split(key)
        self.hidden_size = hidden_size
        self.cell = eqx.nn.GRUCell(2, hidden_size, key=cell_key)
        self.linear = eqx.nn.Linear(hidden_size, 1, use_bias=False, key=linear_key)
        self.bias = jnp.zeros(1)

    def __call__(self, xs):
        out, _ = jax.lax.scan(lambda carry, x: (self.cell(x, carry), None), jnp.zeros(self.hidden_size), xs)
        return jax.nn.sigmoid(self.linear(out) + self.bias)


def test_train_rnn(check_port):
    optim = optax.adam(3e-3)

    def compute_loss(model, x, y):
        pred_y = jax.vmap(model)(x)
        return -jnp.mean(y * jnp.log(pred_y) + (1 - y) * jnp.log(1 - pred_y))

    def own_loop(model, batches, key):
        @eqx.filter_jit
        def make_step(model, x, y, opt_state):
            loss, grads = eqx.filter_value_and_grad(compute_loss)(model, x, y)
            updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
            return loss, eqx.apply_updates(model, updates), opt_state

        opt_state, losses = optim.init(eqx.filter(model, eqx.is_array)), []
        for x, y in batches:
            loss, model, opt_state = make_step(model, x, y, opt_state)
            losses.append(loss)
        return losses

    def glue(model, batches, **run):
        params, static = eqx.partition(model, eqx.is_array)

        def loss(params, batch):
            return compute_loss(eqx.combine(params, static), *batch)

        wrapped, cfg = FunctionalModel(lambda _: params, loss), dict(by_epoch=False, max_iters=STEPS)
        return Runner(wrapped, train_dataloader=batches, train_cfg=cfg, optim_wrapper=optim, **run)

    rng = np.random.default_rng(0)
    batches = [
        (rng.standard_normal((8, 6, 2), np.float32), rng.integers(0, 2, (8, 1)).astype(np.float32))
        for _ in range(STEPS)
    ]
    check_port(glue, own_loop, RNN(8, key=jr.PRNGKey(0)), batches)


# --- deep_convolutional_gan.ipynb: two networks with batch norm, whose state is an eqx.nn.State, in turns. ---


class Network(eqx.Module):
    first: eqx.Module
    norm: eqx.nn.BatchNorm
    second: eqx.Module

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.second(jax.nn.relu(x)), state


def apply(network, x, state):
    return jax.vmap(network, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


def discriminator_loss(discriminator, generator, real, states, key):
    key, subkey = jr.split(key)
    fake, generator_state = apply(generator, jr.normal(subkey, (len(real), 4, 1, 1)), states["generator"])
    pred, state = apply(discriminator, fake, states["discriminator"])
    fake_loss = optax.sigmoid_binary_cross_entropy(pred, jnp.zeros_like(pred)).mean()
    pred, state = apply(discriminator, real, state)
    loss = (fake_loss + optax.sigmoid_binary_cross_entropy(pred, jnp.ones_like(pred)).mean()) / 2
    return loss, (dict(generator=generator_state, discriminator=state), key)


def generator_loss(generator, discriminator, size, states, key):
    key, subkey = jr.split(key)
    fake, state = apply(generator, jr.normal(subkey, (size, 4, 1, 1)), states["generator"])
    pred, discriminator_state = apply(discriminator, fake, states["discriminator"])
    loss = optax.sigmoid_binary_cross_entropy(pred, jnp.ones_like(pred)).mean()
    return loss, (dict(generator=state, discriminator=discriminator_state), key)


def make_networks(key):
    keys = jr.split(key, 4)
    conv, transposed = (functools.partial(layer, use_bias=False) for layer in (eqx.nn.Conv2d, eqx.nn.ConvTranspose2d))
    norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")
    return dict(
        generator=Network(transposed(4, 8, 4, key=keys[0]), norm, transposed(8, 1, 4, 2, padding=1, key=keys[1])),
        discriminator=Network(conv(1, 8, 4, 2, padding=1, key=keys[2]), norm, conv(8, 1, 4, key=keys[3])),
    )


def test_deep_convolutional_gan(check_port):
    adam = optax.adam(2e-3, b1=0.5, b2=0.999)

    def own_loop(networks, states, batches, train_key, key):
        @eqx.filter_jit
        def step(first, second, loss_fn, data, states, key, opt_state):
            (loss, (states, key)), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(
                first, second, data, states, key
            )
            updates, opt_state = adam.update(grads, opt_state)
            return loss, eqx.apply_updates(first, updates), states, key, opt_state

        generator, discriminator, losses = networks["generator"], networks["discriminator"], []
        g_opt, d_opt = (adam.init(eqx.filter(network, eqx.is_inexact_array)) for network in (generator, discriminator))
        for real in batches:
            d_loss, discriminator, states, train_key, d_opt = step(
                discriminator, generator, discriminator_loss, real, states, train_key, d_opt
            )
            g_loss, generator, states, train_key, g_opt = step(
                generator, discriminator, generator_loss, len(real), states, train_key, g_opt
            )
            losses.append((d_loss, g_loss))
        return losses

    def glue(networks, states, batches, train_key, **run):
        params, static = eqx.partition(networks, eqx.is_inexact_array)

        def d_loss(params, model_state, batch):
            nets = eqx.combine(params, static)
            return discriminator_loss(nets["discriminator"], nets["generator"], batch, *model_state)

        def g_loss(params, model_state, batch):
            nets = eqx.combine(params, static)
            return generator_loss(nets["generator"], nets["discriminator"], len(batch), *model_state)

        model = FunctionalModel(lambda _: (params, (states, train_key)), dict(discriminator=d_loss, generator=g_loss))
        optimizers = dict(discriminator=dict(optimizer=adam), generator=dict(optimizer=adam))
        cfg = dict(by_epoch=False, max_iters=STEPS)
        return Runner(model, train_dataloader=batches, train_cfg=cfg, optim_wrapper=optimizers, **run)

    key, train_key = jr.split(jr.PRNGKey(2003))
    networks = make_networks(key)
    states = {name: eqx.nn.State(network) for name, network in networks.items()}
    batches = list(np.random.default_rng(0).uniform(-1, 1, (STEPS, 8, 1, 8, 8)).astype(np.float32))
    names = ("loss_discriminator", "loss_generator")
    check_port(glue, own_loop, networks, states, batches, train_key, names=names)
