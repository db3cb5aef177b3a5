"""Augmentation of whole batches inside the compiled step."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config.errors import ConfigError, closest, config_path
from jengine.data.batch_check import describe_batch
from jengine.data.host_entries import Batch
from jengine.data.pipeline import build_function

AugmentFn = Callable[[Batch, jax.Array], Batch]
_ENTRIES = ("augments", "probs")
_RULE = "an augmentation must be a function (batch, rng) -> batch"


class BatchAugment:
    """One of several augmentations for each batch, drawn at random.

    >>> flip = BatchAugment([lambda batch, rng: {"x": -batch["x"]}], probs=[1.0])
    >>> flip({"x": 3}, jax.random.key(0))
    {'x': -3}

    Args:
      augments: pure functions `(batch, rng) -> batch`, where `rng` is a JAX key.
      probs: a probability for each; if the sum is below 1, a batch is not augmented with the rest.

    Raises:
      ConfigError: a wrong number of probabilities, a negative one, or a sum above 1.
    """

    def __init__(self, augments: Sequence[AugmentFn], probs: Sequence[float]) -> None:
        if len(probs) != len(augments) or min(probs) < 0 or sum(probs) > 1 + 1e-6:
            raise ConfigError(
                f"probs must be {len(augments)} numbers of 0 or more with a sum of at most 1, one "
                f"for each augmentation, got {list(probs)}"
            )
        self.augments = list(augments)
        # The rest is a last branch that does nothing; rounding can make it a little less than 0.
        self.probs = np.asarray([*probs, max(0.0, 1.0 - sum(probs))], np.float32)

    def __call__(self, batch: Batch, rng: jax.Array) -> Batch:
        """Return the augmented batch."""
        if self.probs[0] == 1:  # no random choice to compile
            return self.augments[0](batch, rng)
        self.check(batch, rng)
        choice_rng, augment_rng = jax.random.split(rng)
        index = jax.random.choice(choice_rng, len(self.probs), p=jnp.asarray(self.probs))
        return jax.lax.switch(index, [*self.augments, identity], batch, augment_rng)

    def check(self, batch: Batch, rng: jax.Array) -> None:
        """Raise ConfigError if an augmentation changes the structure, a shape or a dtype in
        `batch`.
        """
        before = describe_batch(batch)
        for augment in self.augments:
            # `lax.switch` needs equal results of all branches, and its own error names types and no
            # augmentation.
            after = describe_batch(jax.eval_shape(augment, batch, rng))
            if after != before:
                path = next(p for p in {**before, **after} if before.get(p) != after.get(p))
                raise ConfigError(
                    "an augmentation that is drawn or switched must keep the shapes and dtypes of "
                    f"a batch; {getattr(augment, '__name__', augment)} turns the entry {path!r} "
                    f"from {before.get(path, 'nothing')} into {after.get(path, 'nothing')}; a "
                    "BatchAugmentHook before it may change them"
                )


def identity(batch: Batch, rng: jax.Array) -> Batch:
    """Return the batch unchanged."""
    return batch


def build_batch_augment(cfg: Any) -> BatchAugment:
    """Build a batch augmentation from a config.

    Args:
      cfg: a function `(batch, rng) -> batch`; a config for one that is registered in TRANSFORMS; or
        `dict(augments=[...], probs=[...])` with several, from which one is drawn for each batch.
        Without `probs` all are equally probable.

    Raises:
      ConfigError: a dict with other entries. TypeError: an augmentation that is not a function.
    """
    if not hasattr(cfg, "items") or "type" in cfg:
        return BatchAugment([build_function(cfg, _RULE)], [1.0])
    for name in cfg:
        if name not in _ENTRIES:
            raise ConfigError(
                f"an entry of batch_augments must be 'augments' or 'probs', got {name!r}"
                f"{closest(name, (*_ENTRIES, 'type'))}"
            )
    entries = cfg.get("augments")
    if not isinstance(entries, Sequence) or not entries:
        raise ConfigError(
            f"batch_augments.augments must be a list of augmentations, got {entries!r}"
        )
    augments = []
    for i, entry in enumerate(entries):
        with config_path("augments", i):
            augments.append(build_function(entry, _RULE))
    return BatchAugment(augments, cfg.get("probs") or [1 / len(augments)] * len(augments))
