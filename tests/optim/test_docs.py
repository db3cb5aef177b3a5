"""The examples of docs/optim.md run."""

import pathlib
import re

import jax.numpy as jnp
import optax
from flax import linen as nn

from jengine.config import OPTIMIZERS
from jengine.optim import AmpOptimWrapper, build_optim_wrapper


def test_examples_of_the_page(monkeypatch):
    assert "" not in OPTIMIZERS  # the first look-up imports the entries
    monkeypatch.setattr(OPTIMIZERS, "_entries", dict(OPTIMIZERS._entries))  # removes that of the page afterwards
    page = (pathlib.Path(__file__).parents[2] / "docs" / "optim.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (mixed,) = [block for block in blocks if "autocast" in block]
    names = {"__name__": "docs.optim"}
    for block in blocks:
        if block != mixed:
            exec(block, names)
    # (4 kernel + bias)^2 falls from 16 by three clipped steps
    assert 0 < float(names["loss"]) < 16
    wrapper = build_optim_wrapper(names["params"], names["optim_wrapper"])
    assert wrapper.accumulative_counts == 4

    module, batch = nn.Dense(3), {"image": jnp.full((2, 4), 1.001), "label": jnp.array([0, 2])}
    params = {"kernel": jnp.ones((4, 3)), "bias": jnp.array([0.0, 1.0, 2.0])}
    wrapper = AmpOptimWrapper(optimizer=dict(type="SGD", lr=0.1))
    names = dict(
        module=module, batch=batch, params=params, wrapper=wrapper, opt_state=wrapper.init(params), optax=optax
    )
    exec(mixed, names)
    # 1.001 is 1 in bfloat16, so the logits are 4, 5 and 6, exactly
    expected = optax.softmax_cross_entropy_with_integer_labels(jnp.array([[4.0, 5.0, 6.0]] * 2), batch["label"]).mean()
    assert float(names["loss"]) == float(expected)
