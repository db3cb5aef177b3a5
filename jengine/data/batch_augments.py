"""Augmentations of whole batches inside the compiled step."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine import paths
from jengine.errors import ConfigError, closest, config_path
from jengine.registry import TRANSFORMS

PyTree = Any
AugmentFn = Callable[[PyTree, jax.Array], PyTree]


class BatchAugment:
    """One of several augmentations for each batch, drawn at random.

    Args:
      augments: pure functions `(batch, rng) -> batch`, with a key of JAX.
      probs: how probable each is; what is missing to 1 is the probability that the batch stays as it is.

    Raises:
      ConfigError: another number of probabilities, a negative one, or a sum above 1.
    """

    def __init__(self, augments: Sequence[AugmentFn], probs: Sequence[float]) -> None:
        if len(probs) != len(augments) or min(probs) < 0 or sum(probs) > 1 + 1e-6:
            raise ConfigError(
                f"the probs of {len(augments)} augmentations are as many numbers of 0 or more with a sum of at most 1; "
                f"found {list(probs)}"
            )
        self.augments = list(augments)
        self.probs = np.asarray([*probs, max(0.0, 1.0 - sum(probs))], np.float32)

    def __call__(self, batch: PyTree, rng: jax.Array) -> PyTree:
        """The batch augmented."""
        if self.probs[0] == 1:
            return self.augments[0](batch, rng)
        choice, own = jax.random.split(rng)
        index = jax.random.choice(choice, len(self.probs), p=jnp.asarray(self.probs))
        return jax.lax.switch(index, [*self.augments, unchanged], batch, own)

    def check(self, batch: PyTree, rng: jax.Array) -> None:
        """Holds that the form of `batch` stays as it is.

        Raises:
          ConfigError: it does not.
        """
        before = {path: (leaf.shape, leaf.dtype) for path, leaf in paths.flatten(batch).items()}
        for augment in self.augments:
            found = jax.eval_shape(augment, batch, rng)
            after = {path: (leaf.shape, leaf.dtype) for path, leaf in paths.flatten(found).items()}
            if after != before:
                path = next(p for p in {**before, **after} if before.get(p) != after.get(p))
                raise ConfigError(
                    f"an augmentation leaves shapes and dtypes of a batch as they are, so that it can be switched off: "
                    f"{getattr(augment, '__name__', augment)} turns the entry {path!r} from {_form(before.get(path))} "
                    f"into {_form(after.get(path))}"
                )


def unchanged(batch: PyTree, rng: jax.Array) -> PyTree:
    """The batch as it is."""
    return batch


def build_batch_augment(cfg: Any) -> BatchAugment:
    """An augmentation of batches from a config.

    Args:
      cfg: a function `(batch, rng) -> batch`; a config of one that is registered in TRANSFORMS; or
        `dict(augments=[...], probs=[...])` with several of those, of which each batch gets one. Without `probs` all are
        equally probable.

    Raises:
      ConfigError: another form of the dict. TypeError: something that is no function.
    """
    if not hasattr(cfg, "items") or "type" in cfg:
        return BatchAugment([_build(cfg)], [1.0])
    for name in cfg:
        if name not in ("augments", "probs"):
            raise ConfigError(f"batch_augments has no entry {name!r}{closest(name, ('augments', 'probs', 'type'))}")
    entries = cfg.get("augments")
    if not isinstance(entries, Sequence) or not entries:
        raise ConfigError(f"batch_augments needs `augments`, a list of augmentations, found {entries!r}")
    augments = []
    for i, entry in enumerate(entries):
        with config_path("augments", i):
            augments.append(_build(entry))
    return BatchAugment(augments, cfg.get("probs") or [1 / len(augments)] * len(augments))


def _build(entry: Any) -> AugmentFn:
    built = TRANSFORMS.build(entry) if hasattr(entry, "items") else entry
    if not callable(built):
        raise TypeError(f"an augmentation is a function (batch, rng) -> batch, or a config of one, found {built!r}")
    return built


def _form(found: tuple[tuple[int, ...], Any] | None) -> str:
    return "nothing" if found is None else f"{found[1]}{list(found[0])}"
