"""Run the first update of the small CNN: `python -m benchmarks.first_step by_hand | by_runner
[every]`.

The update uses gradients accumulated over `every` iterations, 1 by default. The code is a user's
script without unnecessary imports. It skips the cleanup at exit, which is not measured.
"""

import os
import sys
import tempfile


def make_batch():
    """Return a batch for the small CNN."""
    import numpy as np

    rng = np.random.default_rng(0)
    image = rng.standard_normal((32, 16, 16, 3), np.float32)
    return {"image": image, "label": rng.integers(0, 10, 32).astype(np.int32)}


def by_hand(every):
    """Run the update with Flax and optax only."""
    import functools

    import flax.linen as nn
    import jax
    import optax

    class Net(nn.Module):  # the user's network, equal to SmallCNN(widths=(16, 32))
        @nn.compact
        def __call__(self, image, train=False):
            x = image
            for stage, width in enumerate((16, 32)):
                for depth in range(2):
                    stride = 2 if stage > 0 and depth == 0 else 1
                    x = nn.Conv(width, (3, 3), (stride, stride), use_bias=False)(x)
                    x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            return nn.Dense(10)(x.mean(axis=(1, 2)))

    net = Net()
    batch = make_batch()
    tx = optax.adamw(optax.cosine_decay_schedule(1e-4, 1000), weight_decay=0.01)
    if every > 1:
        tx = optax.MultiSteps(tx, every_k_schedule=every).gradient_transformation()

    @jax.jit
    def init(image):
        variables = net.init(jax.random.key(0), image)
        return variables["params"], variables["batch_stats"], tx.init(variables["params"])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        params, batch_stats, opt_state = state

        def loss_fn(params):
            variables = {"params": params, "batch_stats": batch_stats}
            logits, updated = net.apply(
                variables, batch["image"], train=True, mutable=["batch_stats"]
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), updated["batch_stats"]

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), batch_stats, opt_state), loss

    state = init(batch["image"])
    for _ in range(every):
        state, loss = step(state, batch)
    jax.block_until_ready((state, loss))
    os._exit(0)


def by_runner(every):
    """Run the update with the Runner and its default hooks."""
    import jax

    from jengine import Runner
    from jengine.extras.networks import SmallCNN
    from jengine.hooks import Hook
    from jengine.model import CrossEntropy, LinenModel

    class ExitHook(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if runner.iter + 1 == every:
                jax.block_until_ready(runner.state)
                os._exit(0)

    Runner(
        LinenModel(SmallCNN(widths=(16, 32)), CrossEntropy()),
        tempfile.mkdtemp(),
        train_dataloader=[make_batch()] * every,
        train_cfg=dict(by_epoch=False, max_iters=1000),
        optim_wrapper=dict(
            optimizer=dict(type="AdamW", lr=1e-4, weight_decay=0.01), accumulative_counts=every
        ),
        param_scheduler=dict(type="CosineAnnealingLR", by_epoch=False, end=1000),
        custom_hooks=[ExitHook()],
    ).train()


if __name__ == "__main__":
    {"by_hand": by_hand, "by_runner": by_runner}[sys.argv[1]](
        int(sys.argv[2]) if sys.argv[2:] else 1
    )
