import os
import pathlib
import subprocess
import sys

import jax
import pytest

from jengine.train.recompilation import use_compilation_cache

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """
import jax, jax.numpy as jnp
from jengine.train.recompilation import compilation_counter, use_compilation_cache
use_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((3, 3)))
print(jax.config.jax_compilation_cache_dir, compilation_counter.cache_hits, compilation_counter.cache_misses)
"""


def run_script(tmp_path, **more):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMP", "JAX_ENABLE_COMP"))}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), **more}
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    directory, hits, misses = out.stdout.split()
    return directory, int(hits), int(misses)


def test_the_second_start_reuses_the_programs_of_the_first(tmp_path):
    directory, hits, misses = run_script(tmp_path)
    assert directory == str(tmp_path / "jengine" / "jax")
    assert hits == 0
    assert misses > 0
    assert run_script(tmp_path) == (directory, misses, 0)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [("JAX_COMPILATION_CACHE_DIR", "elsewhere", "elsewhere"), ("JAX_ENABLE_COMPILATION_CACHE", "false", "None")],
)
def test_environment_variables_of_jax_take_precedence(tmp_path, variable, value, expected):
    assert run_script(tmp_path, **{variable: str(tmp_path / value) if value == "elsewhere" else value})[0].endswith(
        expected
    )


def test_a_configured_directory_is_kept():
    before = jax.config.jax_compilation_cache_dir
    use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == before
