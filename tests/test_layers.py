"""Imports run in one direction: a package imports only from rows above its own (its own row included)."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent / "jengine"
ROWS = {
    "errors": 0,
    "registry": 1, "config": 1, "paths": 1,
    "apart": 2, "packed": 2, "model": 2, "averaging": 2, "data": 2, "logging": 2,
    "optim": 3,
    "train": 4,
    "parallel": 5, "checkpoint": 5, "evaluation": 5, "visualization": 5,
    "hooks": 6,
    "runner": 7,
    "cli": 8,
}  # fmt: skip


def _imports(path):
    """The jengine packages that a file imports, also inside functions; type-checking imports apart."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"jengine.{a.name}" for a in node.names] if node.module == "jengine" else [node.module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        for name in names:
            if name.startswith("jengine."):
                yield name.split(".")[1], node.lineno


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_from_rows_above(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    assert room in ROWS, f"{room} has no row"
    for imported, line in _imports(path):
        if imported in ROWS:
            assert ROWS[imported] <= ROWS[room], f"{path}:{line} imports {imported}"


def _imported(code, among):
    found = f"{code}; print(*[m for m in {among} if m in sys.modules])"
    command = [sys.executable, "-c", f"import sys; {found}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT.parent).stdout.split()


def test_importing_jengine_imports_no_heavy_library():
    heavy = ("jax", "flax", "optax", "orbax", "grain", "numpy", "ml_collections", "rich")
    assert _imported("import jengine", heavy) == []


def test_a_runner_imports_no_library_that_only_some_runs_need():
    optional = (
        "orbax.checkpoint", "grain", "tensorboard", "matplotlib", "sklearn", "wandb", "mlflow", "PIL", "torch",
        "tensorflow",
    )  # fmt: skip
    assert _imported("import jengine; jengine.Runner", optional) == []
