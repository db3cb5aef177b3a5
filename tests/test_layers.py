"""Imports run in one direction: from packages of lower rows, and never in a circle."""

import ast
import functools
import graphlib
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent / "jengine"
ROWS = {  # see the table of packages in the design
    "errors": 1, "registry": 1, "config": 1, "paths": 1,
    "model": 2, "averaging": 2, "data": 2, "logging": 2,
    "optim": 3,
    "train": 4,
    "sharding": 5, "distributed": 5, "checkpoint": 5, "evaluation": 5, "visualization": 5,
    "hooks": 6,
    "runner": 7,
    "contrib": 8, "cli": 8,
}  # fmt: skip


def _module_name(path):
    return ".".join(("jengine", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


@functools.cache
def _modules():
    """Return the syntax tree of each module, by name."""
    return {_module_name(path): (path, ast.parse(path.read_text())) for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def _reexports(module):
    """Return what a package offers under a name of its own: name -> (module, name there)."""
    path, tree = _modules()[module]
    if path.name != "__init__.py":
        return {}
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.asname: (node.module, alias.name) for node in froms for alias in node.names if alias.asname}


def _defining_module(module, name):
    """Return the module that `from module import name` refers to, behind re-exports; None outside jengine."""
    if f"{module}.{name}" in _modules():
        return f"{module}.{name}"
    if module in _modules() and name in _reexports(module):
        return _defining_module(*_reexports(module)[name])
    return module if module in _modules() else None


def _imports(module):
    """Yield `(module, line, is_reexport)` of each import within jengine, those in functions and for types included."""
    path, tree = _modules()[module]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            for alias in node.names:
                reexport = path.name == "__init__.py" and alias.asname is not None
                yield _defining_module(node.module, alias.name), node.lineno, reexport
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name if alias.name in _modules() else None, node.lineno, False


def test_a_module_imports_only_from_rows_above():
    wrong = []
    for module, (path, _) in _modules().items():
        if module == "jengine":  # offers names of all packages
            continue
        package = module.split(".")[1]
        assert package in ROWS, f"{package} has no row"
        for imported, line, _ in _imports(module):
            if imported not in (None, "jengine") and ROWS[imported.split(".")[1]] > ROWS[package]:
                wrong.append(f"{path.relative_to(ROOT.parent)}:{line} imports {imported}")
    assert not wrong, "\n".join(wrong)


def _cycles(graph):
    """Yield a path of each cycle; `graph` loses one import of each."""
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
            return
        except graphlib.CycleError as error:
            cycle = error.args[1]  # each is imported by the next
            yield " -> ".join(reversed(cycle))
            graph[cycle[1]].discard(cycle[0])


def test_no_modules_import_each_other():
    graph = {
        module: {name for name, _, reexport in _imports(module) if name not in (None, module) and not reexport}
        for module in _modules()
    }
    cycles = list(_cycles(graph))
    assert not cycles, "\n".join(cycles)


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
