"""Cache of compiled programs in the user's directory, and the hits and misses."""

import os
import pathlib

import jax

_EVENTS = {"/jax/compilation_cache/cache_hits": "hits", "/jax/compilation_cache/cache_misses": "misses"}
_counts = {"hits": 0, "misses": 0}
_is_listening = False


def use_compilation_cache() -> None:
    """Store compiled programs in the user's cache directory, unless JAX is configured otherwise.

    `JAX_COMPILATION_CACHE_DIR` selects another directory, `JAX_ENABLE_COMPILATION_CACHE=false` disables the cache.
    """
    global _is_listening
    if not _is_listening:  # JAX cannot remove a listener
        jax.monitoring.register_event_listener(_count_event)
        _is_listening = True
    settings = jax.config.values
    # The user's choice holds, by environment or in code
    if settings["jax_compilation_cache_dir"] is None and settings["jax_enable_compilation_cache"]:
        root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(root) / "jengine" / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)  # JAX's 1 s leaves out small programs


def _count_event(event: str, **_: object) -> None:
    if event in _EVENTS:
        _counts[_EVENTS[event]] += 1


def cache_counts() -> tuple[int, int]:
    """Return the numbers of cache hits and misses in this process."""
    return _counts["hits"], _counts["misses"]
