"""Cache of compiled programs in the user's directory, and the hits and misses."""

import collections
import functools
import os
import pathlib

import jax

_events: collections.Counter[str] = collections.Counter()  # of JAX, by name


def use_compilation_cache() -> None:
    """Store compiled programs in the user's cache directory, unless JAX is configured otherwise.

    `JAX_COMPILATION_CACHE_DIR` selects another directory, `JAX_ENABLE_COMPILATION_CACHE=false`
    disables the cache.
    """
    _count_events()
    settings = jax.config.values
    # The user's choice holds, by environment or in code
    if settings["jax_compilation_cache_dir"] is None and settings["jax_enable_compilation_cache"]:
        root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(root) / "jengine" / "jax"))
        # JAX's 1 s leaves out small programs
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@functools.cache  # once, as JAX cannot remove a listener
def _count_events() -> None:
    jax.monitoring.register_event_listener(lambda event, **_: _events.update([event]))


def cache_counts() -> tuple[int, int]:
    """Return the numbers of cache hits and misses in this process."""
    return _events["/jax/compilation_cache/cache_hits"], _events[
        "/jax/compilation_cache/cache_misses"
    ]
