"""Train in your own loop with the engine's parts: the step is a pure function, the optimizer
wrapper an optax chain.

python examples/own_loop.py
"""

import jax
import numpy as np

from jengine.data import DataLoader, DefaultSampler, Digits
from jengine.extras.networks import SmallCNN
from jengine.model import CrossEntropy, LinenModel
from jengine.optim import build_optim_wrapper
from jengine.train import build_train_step, create_train_state


def main(epochs: int = 3) -> float:
    """Train, and return the accuracy on the held-out digits."""
    model = LinenModel(SmallCNN(widths=(16, 32)), CrossEntropy())
    train = Digits("train")
    test = Digits("test")
    loader = DataLoader(train, 64, DefaultSampler(train, shuffle=True, seed=0), drop_last=True)
    params, model_state = jax.jit(model.init)(jax.random.key(0), next(iter(loader)))

    wrapper = build_optim_wrapper(
        params,
        dict(
            optimizer=dict(type="AdamW", lr=3e-3, weight_decay=0.05),
            clip_grad=dict(max_norm=1.0),
            paramwise_cfg=dict(custom_keys={"bn": dict(decay_mult=0.0), "head": dict(lr_mult=0.5)}),
        ),
        module_types=model.module_types,
    )
    state = create_train_state(params, model_state, wrapper, rng=jax.random.key(1))
    step = jax.jit(build_train_step(model, wrapper), donate_argnums=0)

    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for group in wrapper.param_groups:  # values on the host: changing them does not retrace
            group["lr"] *= 0.9
        for batch in loader:
            state, metrics = step(state, batch, wrapper.hyperparams)
        print(f"epoch {epoch + 1}: loss {float(metrics['loss']):.3f}, lr {wrapper.get_lr()['lr']}")

    batch = test[np.arange(len(test))]
    logits = jax.jit(model.predict)(state.params, state.model_state, batch)
    return float((logits.argmax(-1) == batch["label"]).mean())


if __name__ == "__main__":
    print(f"accuracy {main():.4f}")
