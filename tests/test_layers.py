"""Check that packages import only from lower layers, and that no modules import each other."""

import ast
import functools
import graphlib
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent / "jengine"
LAYERS = {  # the table of packages in the design
    "errors": 1, "json_codec": 1, "description": 1, "construction": 1, "closures": 1, "versions": 1, "annotations": 1, "registry": 1, "config": 1, "paths": 1,
    "selection": 1, "scores": 1, "storage": 1, "downloads": 1, "duration": 1,
    "model": 2, "averaging": 2, "data": 2, "logging": 2,
    "optim": 3,
    "train": 4,
    "sharding": 5, "distributed": 5, "checkpoint": 5, "evaluation": 5, "visualization": 5, "runs": 5,
    "hooks": 6, "inference": 6, "sweeps": 6,
    "runner": 7,
    "contrib": 8, "cli": 8,
    "__main__": 9,
}  # fmt: skip


def _module_name(path):
    return ".".join(("jengine", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


@functools.cache
def _modules():
    """Return the syntax tree of each module, by name."""
    return {_module_name(path): (path, ast.parse(path.read_text())) for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def _reexports(module):
    """Return the re-exports of a package: name -> (defining module, name in that module)."""
    path, tree = _modules()[module]
    if path.name != "__init__.py":
        return {}
    import_nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.asname: (node.module, alias.name) for node in import_nodes for alias in node.names if alias.asname}


def _defining_module(module, name):
    """Return the module that defines `name` of `module`, resolving re-exports; None outside jengine."""
    if f"{module}.{name}" in _modules():
        return f"{module}.{name}"
    if module in _modules() and name in _reexports(module):
        return _defining_module(*_reexports(module)[name])
    return module if module in _modules() else None


def _imports(module):
    """Yield `(module, line, is_reexport)` of each import within jengine, including those in functions and for types."""
    path, tree = _modules()[module]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports must be absolute"
            for alias in node.names:
                reexport = path.name == "__init__.py" and alias.asname is not None
                yield _defining_module(node.module, alias.name), node.lineno, reexport
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name if alias.name in _modules() else None, node.lineno, False


def test_modules_import_only_from_the_same_or_lower_layers():
    violations = []
    for module, (path, _) in _modules().items():
        if module == "jengine":  # re-exports names of all packages
            continue
        package = module.split(".")[1]
        assert package in LAYERS, f"{package} must be in LAYERS"
        for imported, line, _ in _imports(module):
            if imported not in (None, "jengine") and LAYERS[imported.split(".")[1]] > LAYERS[package]:
                violations.append(f"{path.relative_to(ROOT.parent)}:{line} imports {imported}")
    assert not violations, "\n".join(violations)


def _cycles(graph):
    """Yield each import cycle, and remove one of its imports from `graph`."""
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
            return
        except graphlib.CycleError as error:
            cycle = error.args[1]  # each module is imported by the next
            yield " -> ".join(reversed(cycle))
            graph[cycle[1]].discard(cycle[0])


def test_imports_have_no_cycles():
    graph = {
        module: {name for name, _, reexport in _imports(module) if name not in (None, module) and not reexport}
        for module in _modules()
    }
    cycles = list(_cycles(graph))
    assert not cycles, "\n".join(cycles)


def test_packages_import_each_other_in_one_direction_with_ten_floors_below_the_command_line():
    # The registry imports what a config names, within functions; all other pairs have one direction.
    graph = {package: set() for package in LAYERS}
    for module in _modules():
        package = module.split(".")[1] if "." in module else ""
        names = {name.split(".")[1] for name, _, _ in _imports(module) if name not in (None, "jengine")}
        graph.setdefault(package, set()).update(names - {package} - ({"config"} if package == "registry" else set()))
    del graph[""]  # re-exports names of all packages
    floors = {}
    for package in graphlib.TopologicalSorter(graph).static_order():  # CycleError: two packages import each other
        floors[package] = 1 + max((floors[other] for other in graph[package]), default=0)
    assert floors["cli"] <= 10, floors


def _loaded_after(code, modules):
    """Return the `modules` that are loaded after running `code` in a new process."""
    script = f"import sys; {code}; print(*[m for m in {modules} if m in sys.modules])"
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT.parent).stdout.split()


def test_importing_jengine_loads_no_heavy_library():
    heavy = ("jax", "flax", "optax", "orbax", "grain", "numpy", "ml_collections", "rich")
    assert _loaded_after("import jengine", heavy) == []


def test_importing_the_runner_loads_no_optional_library():
    optional = (
        "orbax.checkpoint", "grain", "tensorboard", "matplotlib", "sklearn", "wandb", "mlflow", "aim", "clearml", "comet_ml", "PIL", "torch",
        "tensorflow",
    )  # fmt: skip
    assert _loaded_after("import jengine; jengine.Runner", optional) == []
