"""Test that this JAX release has the private parts of its runtime that several processes need."""

import pathlib
import sys
import types

import jax
import pytest

from jengine.distributed import jax_internals

ADVICE = "install another JAX release, or update jengine/distributed/jax_internals.py"


def test_this_jax_has_the_client_of_the_coordination_service(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    client = jax_internals.get_client()  # raises an ImportError with advice if JAX has moved it
    assert client.store is None  # not connected
    assert client.process_id == 0


def test_this_jax_has_cluster_detection():
    settings = ("host:1", 2, 1, [0])
    assert jax_internals.detect_cluster(*settings, method=None, timeout=1) == settings


def test_a_jax_without_the_client_is_an_import_error_with_advice(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setitem(sys.modules, "jax._src.distributed", types.SimpleNamespace())
    with pytest.raises(ImportError, match=f"jengine needs `jax._src.distributed.global_state` .*; {ADVICE}"):
        jax_internals.get_client()


def test_a_jax_without_cluster_detection_is_an_import_error_with_advice(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.clusters", types.SimpleNamespace())
    with pytest.raises(ImportError, match=f"jengine needs `jax._src.clusters.ClusterEnv` .*; {ADVICE}"):
        jax_internals.detect_cluster(None, None, None, None, None, 1)


def test_a_process_that_is_not_connected_has_no_client():
    assert jax_internals.get_client() is None


def test_no_other_module_uses_private_parts_of_jax():
    package = pathlib.Path(jax_internals.__file__).parents[1]
    users = [path.name for path in package.rglob("*.py") if "jax._src" in path.read_text()]
    assert users == ["jax_internals.py"]
