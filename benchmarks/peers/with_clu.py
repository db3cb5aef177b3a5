"""Measure a loop in the style of the Flax examples: TrainState, CLU metrics, periodic actions
and writers.
"""

import functools
import importlib.metadata
import tempfile

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from clu import metric_writers, metrics, periodic_actions
from flax.training import train_state

from benchmarks.peers import bare_jax
from benchmarks.peers.common import CLASSES, FEATURES, HIDDEN, LOG_EVERY, MOMENTUM, RATE, compare


@flax.struct.dataclass
class TrainMetrics(metrics.Collection):
    """Collect the logged metrics."""

    loss: metrics.Average.from_output("loss")


class Net(nn.Module):
    """Define the network."""

    @nn.compact
    def __call__(self, x):
        """Compute the logits."""
        return nn.Dense(CLASSES)(jnp.tanh(nn.Dense(HIDDEN)(x)))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(state, train_metrics, x, y):
    """Return `(state, metrics)` after one iteration."""

    def loss_fn(params):
        return optax.softmax_cross_entropy_with_integer_labels(state.apply_fn(params, x), y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), train_metrics.merge(
        TrainMetrics.single_from_model_output(loss=loss)
    )


def run(data):
    """Train on the data once."""
    net = NET
    params = net.init(jax.random.key(0), jnp.zeros((1, FEATURES)))
    state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=TX)
    with tempfile.TemporaryDirectory() as work_dir:
        writer = metric_writers.create_default_writer(work_dir, just_logging=True)
        hooks = [periodic_actions.ReportProgress(num_train_steps=len(data), writer=writer)]
        train_metrics = TrainMetrics.empty()
        with metric_writers.ensure_flushes(writer):
            for i, (x, y) in enumerate(data, 1):
                state, train_metrics = step(state, train_metrics, x, y)
                for hook in hooks:
                    hook(i)
                if i % LOG_EVERY == 0:
                    writer.write_scalars(i, train_metrics.compute())
                    train_metrics = TrainMetrics.empty()


NET = Net()
TX = optax.sgd(RATE, momentum=MOMENTUM)
compare(
    {"bare": bare_jax.LOOP, "trainer": (run, lambda x, y: (x, y))},
    importlib.metadata.version("clu"),
)
