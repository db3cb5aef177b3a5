"""Train with a script by hand: Flax, optax and Orbax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from benchmarks.peers.whole.flax_models import NETWORKS
from benchmarks.peers.whole.tasks import Log, has_decay, iterate, read_arguments, write_result

name, task, data, directory = read_arguments()
model = NETWORKS[name]()
variables = jax.jit(functools.partial(model.init, train=False))(
    jax.random.key(0), data.train[0][: task.batch]
)
params = variables["params"]
schedule = optax.warmup_cosine_decay_schedule(0.0, task.rate, task.warmup, task.steps)
mask = jax.tree_util.tree_map_with_path(
    lambda path, leaf: has_decay(jax.tree_util.keystr(path), leaf.ndim), params
)
tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(schedule, *task.betas, weight_decay=task.decay, mask=mask),
)
state = dict(params=params, stats=variables.get("batch_stats", {}), opt=jax.jit(tx.init)(params))


def mean_loss(logits, y, smoothing):
    """Return the mean cross-entropy."""
    if not smoothing:
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    targets = optax.smooth_labels(jax.nn.one_hot(y, task.outputs), smoothing)
    return optax.softmax_cross_entropy(logits, targets).mean()


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, x, y, step):
    """Return `(state, loss)` after one iteration."""
    key = jax.random.fold_in(jax.random.key(1), step)

    def loss_fn(params):
        logits, updated = model.apply(
            {"params": params, "batch_stats": state["stats"]},
            x,
            train=True,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return mean_loss(logits, y, task.smoothing), updated.get("batch_stats", {})

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return dict(params=optax.apply_updates(state["params"], updates), stats=stats, opt=opt), loss


@jax.jit
def evaluate(state, x, y):
    """Return the sums over a batch: right ones, or losses of bytes."""
    logits = model.apply({"params": state["params"], "batch_stats": state["stats"]}, x, train=False)
    if name == "text":
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).sum()
    return (logits.argmax(-1) == y).sum()


def validate(state):
    """Return the accuracy, or the mean loss of the text."""
    x, y = data.test
    parts = [slice(start, start + 128) for start in range(0, len(x), 128)]
    return sum(float(evaluate(state, x[part], y[part])) for part in parts) / y.size


log = Log(directory)
losses = []
options = ocp.CheckpointManagerOptions(max_to_keep=2)
with ocp.CheckpointManager((directory / "checkpoints").absolute(), options=options) as manager:
    for step, (x, y) in enumerate(iterate(data, task), 1):
        state, loss = train_step(state, x, y, jnp.int32(step))
        losses.append(loss)
        if step % task.log_every == 0:
            log.write(step=step, loss=float(np.mean(jax.device_get(losses))))
            losses.clear()
        if step % task.val_every == 0:
            metric = validate(state)
            log.write(step=step, metric=metric)
        if step % task.save_every == 0:
            manager.save(step, args=ocp.args.StandardSave(state))
write_result(directory, metric)
