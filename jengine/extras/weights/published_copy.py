"""Copies of checkpoints with only the parts to share."""

import hashlib
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from jengine.checkpoint import commit
from jengine.checkpoint.arrays import encode
from jengine.checkpoint.layout import STATE, encode_meta, find_checkpoint
from jengine.checkpoint.manifest import read_manifest, seal
from jengine.checkpoint.orbax import start_write
from jengine.checkpoint.restore import load
from jengine.config.errors import UnknownNameError, closest
from jengine.config.paths import flatten
from jengine.config.storage import storage_path, write_bytes


def publish(
    path: str | os.PathLike[str], keys: Iterable[str], name: str | None = None
) -> tuple[str, list[str]]:
    """Write a copy with only some keys next to a checkpoint, by default with a name that identifies
    the content.

    Args:
      path: the checkpoint.
      keys: the keys to keep: state items (`params`, `model_state`, …), metadata (`meta`,
        `message_hub`, …), and `state_dict` for `params` with `model_state`.
      name: the copy's name; by default `<checkpoint>-<first 8 hex digits of the SHA-256 of its
        arrays>`. An existing copy is replaced.

    Returns:
      The new path, and the keys that were left out.

    Raises:
      KeyError: the checkpoint does not have a key. ValueError: none of the keys is a state item.
    """
    source = storage_path("path", find_checkpoint(path))
    checkpoint = load(source)
    known = {*checkpoint.state, *checkpoint.meta, "state_dict"}
    selected: set[str] = set()
    for key in keys:
        if key not in known:
            raise UnknownNameError(f"checkpoint {source} has no key {key!r}{closest(key, known)}")
        selected |= {"params", "model_state"} if key == "state_dict" else {key}
    state = {key: value for key, value in checkpoint.state.items() if key in selected}
    if not flatten(state):
        items = ", ".join(checkpoint.state)
        raise ValueError(
            f"`keys` must include an item of the state ({items}) of {source}, got "
            f"{sorted(selected)}"
        )
    copy = source.with_name(name or f"{source.name}-{_digest(state)}")
    manifest = read_manifest(source)
    assert manifest is not None  # `find_checkpoint` has read it
    commit.begin(copy, manifest.run)
    incoming = commit.find_incoming(copy)
    # no barriers of a save: only one process publishes
    start_write(incoming / STATE, encode(state, alone=True), alone=True)()
    meta = encode_meta({key: x for key, x in checkpoint.meta.items() if key in selected})
    for file, content in meta.items():
        write_bytes(incoming / file, content)
    # no iteration: never resumed from
    seal(incoming, run=manifest.run, is_latest=False, iteration=None)
    commit.finish(copy)
    return str(copy), sorted({*checkpoint.state, *checkpoint.meta} - selected)


def _digest(state: Any) -> str:
    """Hash names, dtypes, shapes and bytes; equal parameters have equal hashes on any machine."""
    digest = hashlib.sha256()
    for name, leaf in sorted(flatten(state).items()):  # the order of a tree is no content
        digest.update(f"{name}:{leaf.dtype}:{leaf.shape}:".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()[:8]
