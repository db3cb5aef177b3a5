"""Use the engine's optimizer, loss scale and averaging in your own `jax.pmap` step.

python examples/pmap_loop.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jengine.data import Digits
from jengine.optim import AdamW, AmpOptimWrapper
from jengine.train import ExponentialMovingAverage


def compute_logits(params, image):
    """Return the logits of a perceptron with one hidden layer."""
    return jax.nn.relu(image @ params["hidden"]) @ params["head"]


def main(steps: int = 200, batch_size: int = 64) -> tuple[float, float]:
    """Train on all devices, and return the accuracies of the weights and of their average."""
    count = jax.local_device_count()
    train = Digits("train", flat=True)
    test = Digits("test", flat=True)

    keys = jax.random.split(jax.random.key(0))
    params = {
        "hidden": jax.random.normal(keys[0], (64, 128)) / 8,
        "head": jax.random.normal(keys[1], (128, 10)) / 11,
    }
    # gradients are averaged over `axis_name`, once per update; the parameters are replicated on all
    # devices
    wrapper = AmpOptimWrapper(
        optimizer=AdamW(lr=3e-3),
        clip_grad=dict(max_norm=1.0),
        dtype="float16",
        loss_scale="dynamic",
        axis_name="data",
    )

    def loss_fn(params, batch):
        """Return the mean cross-entropy; the network computes in float16, the loss in float32."""
        logits = wrapper.autocast(compute_logits)(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    average = ExponentialMovingAverage(momentum=0.05)

    @functools.partial(
        jax.pmap, axis_name="data", in_axes=(0, 0, 0, 0, None), donate_argnums=(0, 1, 2)
    )
    def step(params, opt_state, averaged, batch, hyperparams):
        loss, grads = wrapper.value_and_grad(loss_fn)(params, opt_state, batch)
        params, opt_state = wrapper.apply_gradients(grads, opt_state, params, hyperparams)
        return params, opt_state, average.update(averaged, params), jax.lax.pmean(loss, "data")

    # pmap requires a leading axis with a copy for each device
    params, opt_state, averaged = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (count, *x.shape)),
        (params, wrapper.init(params), average.init(params)),
    )
    rng = np.random.default_rng(0)
    for i in range(steps):
        batch = train[rng.permutation(len(train))[:batch_size]]
        batch = {
            name: x.reshape(count, batch_size // count, *x.shape[1:]) for name, x in batch.items()
        }
        params, opt_state, averaged, loss = step(
            params, opt_state, averaged, batch, wrapper.hyperparams
        )
        # at most one step in flight: several CPU devices hang with more
        jax.block_until_ready(loss)
        if (i + 1) % 50 == 0:
            scale = optax.tree.get(opt_state, "loss_scale")[0]
            print(f"step {i + 1}: loss {float(loss[0]):.3f}, loss scale {float(scale):g}")

    first = jax.tree.map(lambda x: x[0], (params, averaged.params))
    predictions = [compute_logits(p, test.arrays["image"]).argmax(-1) for p in first]
    return tuple(float((labels == test.arrays["label"]).mean()) for labels in predictions)


if __name__ == "__main__":
    print("accuracy {:.4f}, of the average {:.4f}".format(*main()))
