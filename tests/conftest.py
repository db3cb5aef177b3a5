"""Eight fake CPU devices, one compilation cache for all tests, and nothing that waits."""

import os
import pathlib
import sys

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JENGINE_ON_RECOMPILE", "raise")  # a compile that nobody asked for fails the test

import jax
import pytest

_CACHE = pathlib.Path(__file__).parent.parent / ".cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def event_files_in_order(monkeypatch):
    """Counts TensorBoard's event files anew in each test.

    Files of one second are read in the order of a counter that is compared as text: the tenth would come before the
    ninth. Runs of different seconds or processes have no such trouble.
    """
    module = sys.modules.get("tensorboard.summary.writer.event_file_writer")
    if module is not None:
        monkeypatch.setattr(module, "_global_uid", module.AtomicCounter(0))


@pytest.fixture(scope="module")
def quick_compiles():
    """Programs are compiled with few optimizations: for tests that compile a lot and compare no bits."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
