"""https://github.com/google/flax, examples/ogbg_molpcba/train.py: a graph network on padded graphs, with NaN labels."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state

from jengine import Runner
from jengine.model import FunctionalModel

jraph = pytest.importorskip("jraph")

pytestmark = pytest.mark.ports

STEPS = 20


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm()(nn.relu(nn.Dense(8)(x)))


class GraphNet(nn.Module):
    deterministic: bool

    @nn.compact
    def __call__(self, graphs):
        def update(*inputs):
            x = MLP()(jnp.concatenate(inputs, axis=-1))
            return nn.Dropout(0.1, deterministic=self.deterministic)(x)

        for _ in range(2):
            graphs = jraph.GraphNetwork(
                update_edge_fn=lambda edges, senders, receivers, globals_: update(edges, senders, receivers, globals_),
                update_node_fn=lambda nodes, sent, received, globals_: update(nodes, sent, received, globals_),
                update_global_fn=lambda nodes, edges, globals_: update(nodes, edges, globals_),
            )(graphs)
        return graphs._replace(globals=nn.Dense(4)(graphs.globals))


def masked_loss(apply, params, graphs, rngs):
    labels = graphs.globals
    graphs = graphs._replace(globals=jnp.ones((len(graphs.n_node), 1)))
    logits = apply(params, graphs, rngs=rngs).globals
    mask = ~jnp.isnan(labels) & jraph.get_graph_padding_mask(graphs)[:, None]
    loss = optax.sigmoid_binary_cross_entropy(logits, jnp.where(mask, labels, 0))
    return jnp.where(mask, loss, 0).sum() / mask.sum()


def make_batches(count=STEPS, size=3):
    rng, batches = np.random.default_rng(0), []
    for _ in range(count):
        graphs = []
        for n_node, n_edge in rng.integers(2, 7, (size, 2)):
            labels = rng.integers(0, 2, (1, 4)).astype(np.float32)
            labels[rng.random((1, 4)) < 0.2] = np.nan
            graphs.append(
                jraph.GraphsTuple(
                    nodes=rng.standard_normal((n_node, 3), np.float32),
                    edges=rng.standard_normal((n_edge, 2), np.float32),
                    senders=rng.integers(0, n_node, n_edge, np.int32),
                    receivers=rng.integers(0, n_node, n_edge, np.int32),
                    n_node=np.array([n_node], np.int32),
                    n_edge=np.array([n_edge], np.int32),
                    globals=labels,
                )
            )
        padded = jraph.pad_with_graphs(jraph.batch_np(graphs), n_node=24, n_edge=24, n_graph=size + 1)
        batches.append(jax.tree.map(np.asarray, padded))
    return batches


def test_ogbg_molpcba(check_port):
    tx, apply = optax.adam(1e-2), GraphNet(deterministic=False).apply

    def own_loop(params, batches, rng, key):
        @jax.jit
        def train_step(state, graphs, rngs):
            loss, grads = jax.value_and_grad(lambda params: masked_loss(apply, params, graphs, rngs))(state.params)
            return state.apply_gradients(grads=grads), loss

        state, losses = train_state.TrainState.create(apply_fn=apply, params=params, tx=tx), []
        for graphs in batches:
            rng, dropout_rng = jax.random.split(rng)
            state, loss = train_step(state, graphs, {"dropout": dropout_rng})
            losses.append(loss)
        return losses

    def glue(params, batches, rng, **run):
        def loss(params, model_state, batch):
            rng, dropout_rng = jax.random.split(model_state["rng"])
            return masked_loss(apply, params, batch, {"dropout": dropout_rng}), {"rng": rng}

        model, cfg = FunctionalModel(lambda _: (params, {"rng": rng}), loss), dict(by_epoch=False, max_iters=STEPS)
        data = dict(dataset=batches, batch_axis=None, sampler=dict(type="DefaultSampler", shuffle=False))
        return Runner(model, train_dataloader=data, train_cfg=cfg, optim_wrapper=tx, **run)

    batches = make_batches()
    rng, init_rng = jax.random.split(jax.random.PRNGKey(0))
    example = batches[0]._replace(globals=np.ones((4, 1), np.float32))
    check_port(glue, own_loop, GraphNet(deterministic=True).init(init_rng, example), batches, rng)
