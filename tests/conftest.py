"""Set up eight simulated CPU devices, quick compilation and a compilation cache shared by all processes."""

import gc
import importlib.metadata
import logging
import os
import pathlib
import shutil
import sys

import pytest

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")  # a failing test shows all frames
os.environ.setdefault("JENGINE_ON_RECOMPILE", "raise")  # an unexpected recompilation fails the test
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(pathlib.Path(__file__).parent.parent / ".cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Each run and each checkpoint is synced to the disk, which takes longer than to train: files in memory need no sync.
if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 2**32:  # a full run writes 0.6 GB
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
# Tests and what they import are compiled once for all processes and later runs, whatever the environment says.
dont_write_bytecode = sys.dont_write_bytecode
sys.dont_write_bytecode = False
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # read at its import: or it asks Google about each bucket


def pytest_configure(config):
    """Compile with few optimizations and XLA's older emitters, because most tests spend more time compiling than running.

    XLA reads its flags once per process, so tests that require fully optimized programs run in separate processes, with
    `-m full_optimization` as in `make test`. Without this option they also run, with quick compilation.
    """
    config.addinivalue_line(
        "markers", "full_optimization: compares programs or values exactly, compiled with full optimization"
    )
    # Only XLA's compiler for CPUs is known to compile all tests without optimizations.
    if config.option.markexpr != "full_optimization" and os.environ["JAX_PLATFORMS"] == "cpu":
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        if importlib.metadata.version("jaxlib").startswith("0.10."):  # XLA aborts on unknown flags
            # one part per program: each part costs as much to set up as most of them take to compile
            os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # no test reads the lines of operations in a program


def pytest_collection_finish(session):
    """Collect garbage rarely: imported modules never are, and JAX's caches of traces keep most other objects alive."""
    sys.dont_write_bytecode = dont_write_bytecode
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="session")
def lowered_programs():
    """The lengths of time in which JAX has lowered programs."""
    import jax

    seconds = []

    def record(event, duration, **_):
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(record)
    return seconds


@pytest.fixture(scope="session", autouse=True)
def shared_context():
    """Let all programs share a context of MLIR; see `tests.forks`."""
    from tests.forks import share_context

    share_context()


@pytest.fixture(scope="module", autouse=True)
def forgotten_programs(lowered_programs):
    """Forget programs from time to time: JAX keeps thousands, which take memory."""
    yield
    if len(lowered_programs) > 4000:
        sys.modules["jax"].clear_caches()
        lowered_programs.clear()


@pytest.fixture(autouse=True)
def reset_event_file_counter(monkeypatch):
    """Reset TensorBoard's counter of event files in each test.

    Files created in the same second are read in the order of this counter, compared as text: the tenth would come
    before the ninth. Files of different seconds or processes are not affected.
    """
    module = sys.modules.get("tensorboard.summary.writer.event_file_writer")
    if module is not None:
        monkeypatch.setattr(module, "_global_uid", module.AtomicCounter(0))


@pytest.fixture(autouse=True)
def restored_log_level():
    """Restore the level of the logger, which each run sets, so that no test depends on those before it."""
    logger = logging.getLogger("jengine")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def only_new_garbage():
    """Leave what exists out of garbage collections, which in a process of many tests take a second each."""
    gc.freeze()


@pytest.fixture
def caplog(caplog, monkeypatch):
    """Capture the records of runs too, whose logger does not propagate them to the root logger."""
    logger = logging.getLogger("jengine")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def run_page(tmp_path, monkeypatch):
    """A function that runs the code of a page of docs/ in an empty directory, and returns its names.

    Its runs are then checked against the table in `tests.run_again`. `names` are those that the page takes for granted;
    `before` has further ones for a block, by its first line. Blocks in `skipped` are not run, or all for which
    `only` is false; `replace` is an old and a new text.
    """
    from tests.docs_pages import page_runner

    yield from page_runner(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def run_python():
    """A function that runs code in a new process, which has JAX; see `tests.forks`."""
    from tests.forks import forks

    return forks()


@pytest.fixture(scope="session")
def google_storage():
    """An emulator of Google Cloud Storage, which records requests and can fail; see `tests.object_stores`."""
    from tests.object_stores import serve_google_storage

    with serve_google_storage() as store:
        yield store


@pytest.fixture
def gs_bucket(google_storage):
    """The URL of a new bucket, `gs://bucket-0`."""
    google_storage.requests.clear()
    yield google_storage.make_bucket()
    google_storage.choose_fault = lambda method, path: None
    google_storage.delay = 0.0


@pytest.fixture(scope="session")
def s3_storage():
    """An emulator of S3, which records requests and can fail; see `tests.object_stores`."""
    from tests.object_stores import serve_s3

    with serve_s3() as store:
        yield store


@pytest.fixture
def s3_bucket(s3_storage):
    """The URL of a new bucket, `s3://bucket-0`."""
    s3_storage.requests.clear()
    yield s3_storage.make_bucket()
    s3_storage.choose_fault = lambda method, path: None
    s3_storage.delay = 0.0
