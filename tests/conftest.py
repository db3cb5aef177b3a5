"""Eight fake CPU devices, quick compiles, one compilation cache for all processes, and nothing that waits."""

import importlib.metadata
import os
import pathlib
import sys

import pytest

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JENGINE_ON_RECOMPILE", "raise")  # a compile that nobody asked for fails the test
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(pathlib.Path(__file__).parent.parent / ".cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_configure(config):
    """Compile with few optimizations and XLA's older emitters: most tests compile longer than they run.

    XLA reads its flags once in a process, so tests that need the programs of users run in processes of their own, with
    `-m full_optimization` as in `make test`. Without the option they run too, with quick compiles like all others.
    """
    config.addinivalue_line("markers", "full_optimization: compares programs or values closely, compiled as for users")
    if config.option.markexpr != "full_optimization":
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        if importlib.metadata.version("jaxlib").startswith("0.10."):  # XLA aborts at a flag that it does not know
            os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"


@pytest.fixture(autouse=True)
def event_files_in_order(monkeypatch):
    """Counts TensorBoard's event files anew in each test.

    Files of one second are read in the order of a counter that is compared as text: the tenth would come before the
    ninth. Runs of different seconds or processes have no such trouble.
    """
    module = sys.modules.get("tensorboard.summary.writer.event_file_writer")
    if module is not None:
        monkeypatch.setattr(module, "_global_uid", module.AtomicCounter(0))
