"""Check that rooms import only rooms before them, that no modules import each other, and that extras can be deleted."""

import ast
import contextlib
import functools
import graphlib
import importlib
import itertools
import os
import pathlib
import random
import re
import rlcompleter
import runpy
import shutil
import subprocess
import sys
import types

import pytest

import jengine
from jengine.config import plugins, registry
from tests.forks import Forks

ROOT = pathlib.Path(__file__).parent.parent / "jengine"
ROOMS = ("config", "logging", "data", "model", "optim", "parallel", "checkpoint", "train", "evaluation", "hooks", "runner", "cli")
EXTRAS = sorted(path.parent.name for path in (ROOT / "extras").glob("*/plugin.py"))
NAMED = re.compile(r"jengine(\.\w+)+")  # a module in a string, as for `importlib` or `python -m`


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
    """Yield `(module, line, is_reexport)` of each import within jengine, including those in functions, for types and in strings."""
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
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
            yield node.value if node.value in _modules() else None, node.lineno, True


def _place(module):
    """Return the room of a module in the core, or the extra that it belongs to."""
    parts = module.split(".")
    return "/".join(parts[1:3]) if parts[1] == "extras" else parts[1]


def test_there_are_twelve_rooms_and_three_loose_modules():
    assert {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"} == {*ROOMS, "extras"}
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "versions.py"}
    for room in ROOMS:
        assert ast.get_docstring(_modules()[f"jengine.{room}"][1]), room


def test_rooms_import_only_rooms_before_them():
    violations = []
    for module, (path, _) in _modules().items():
        if module in ("jengine", "jengine.__main__") or module.startswith("jengine.extras"):
            continue
        for imported, line, _ in _imports(module):
            if imported in (None, "jengine", "jengine.versions"):
                continue
            if _place(imported) not in ROOMS[: ROOMS.index(_place(module)) + 1]:
                violations.append(f"{path.relative_to(ROOT.parent)}:{line} imports {imported}")
    assert not violations, "\n".join(violations)


def test_extras_import_the_core_and_the_extras_that_they_require():
    violations = []
    for module, (path, _) in _modules().items():
        if not module.startswith("jengine.extras."):
            continue
        own = _place(module)
        allowed = {*ROOMS, own, *(f"extras/{name}" for name in _provides(own.split("/")[1]).get("requires", {}))}
        for imported, line, _ in _imports(module):
            if imported not in (None, "jengine", "jengine.versions") and _place(imported) not in allowed:
                violations.append(f"{path.relative_to(ROOT.parent)}:{line} imports {imported}")
    assert not violations, "\n".join(violations)


def test_at_most_five_pairs_of_extras_need_one_another():
    pairs = [(extra, other) for extra in EXTRAS for other in _provides(extra).get("requires", {})]
    assert len(pairs) <= 5, pairs


def _provides(extra):
    return plugins._find_extras()[extra]


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


@pytest.mark.parametrize("extra", EXTRAS)
def test_plugins_import_nothing_and_name_what_exists(extra):
    _, tree = _modules()[f"jengine.extras.{extra}.plugin"]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for section, names in _provides(extra).items():
        for name, module in names.items():
            assert section == "requires" or module.startswith(f"jengine.extras.{extra}."), (section, name)
            assert module in _modules(), (section, name, module)
            # `from jengine.extras.EXTRA import NAME` would find the module once it was imported.
            assert section in ("commands", "requires") or f"jengine.extras.{extra}.{name}" not in _modules(), (section, name)


@pytest.mark.parametrize("room", ROOMS)
def test_pages_of_rooms_name_what_exists(room):
    page = importlib.import_module(f"jengine.{room}")
    for section, names in getattr(page, "provides", {}).items():
        for name, module in names.items():
            imported = importlib.import_module(module)
            assert f"jengine.{room}.{name}" not in _modules(), name  # it would replace the name once it was imported
            assert name in registry.__dict__[section] if section in registry.__dict__ else hasattr(imported, name), (section, name)


@pytest.mark.parametrize("extra", EXTRAS)
def test_no_name_of_an_extra_is_the_name_of_one_of_its_modules(extra):
    # The import of the module would replace the name on the page of the extra.
    names = {n for section, found in _provides(extra).items() if section.isupper() or section == "names" for n in found}
    assert not names & {path.stem for path in (ROOT / "extras" / extra).glob("*.py")}


ROOMS_FIRST = f"""
import importlib
from jengine.config import plugins, registry
registries = lambda: {{id(r): (r, set(r._entries)) for r in list(registry._REGISTRIES)}}
for room in {ROOMS}: importlib.import_module("jengine." + room)
for _ in range(2):  # an entry's module may have a registry of its own
    for registered in list(registry._REGISTRIES): len(registered)
before = registries()
"""
REGISTERED = """
for module in {modules}: importlib.import_module(module)
for key, (registered, names) in registries().items():
    new = names - before.get(key, (None, set()))[1]
    len(registered)  # imports its page
    print(*sorted(new - set(registered._modules) - set(plugins.provided(registered._section))))
"""


def test_plugins_list_all_that_their_modules_register():
    modules = {e: [m for m in _modules() if m.startswith(f"jengine.extras.{e}.") and "__main__" not in m] for e in EXTRAS}
    with contextlib.closing(Forks(ROOMS_FIRST)) as run:
        done = {extra: run(REGISTERED.format(modules=found)) for extra, found in modules.items()}
    assert {extra: found.stdout.split() for extra, found in done.items()} == {extra: [] for extra in EXTRAS}
    assert {found.returncode for found in done.values()} == {0}


def test_the_index_of_names_and_the_stubs_are_as_the_script_writes_them():
    # An extra that was deleted can no longer say what it had, and editors see the names that are imported on use.
    files = runpy.run_path(str(ROOT.parent / ".ci" / "extras_names.py"))["make_files"]()
    assert [path for path, text in files.items() if not path.is_file() or path.read_text() != text] == []
    assert {path for path in files if path.suffix == ".pyi"} == set(ROOT.rglob("*.pyi"))


PAGES = [_module_name(path) for path in sorted(ROOT.rglob("__init__.py")) if "__dir__" in path.read_text()]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_its_public_names_alone(page):
    module = importlib.import_module(page)
    shown = dir(module)
    assert shown == sorted(set(shown))
    for name in shown:
        value = getattr(module, name)
        assert not isinstance(value, types.ModuleType) or value.__name__ == f"{page}.{name}", name
        is_alias = isinstance(value, types.UnionType)  # of `typing`, since Python 3.14
        assert is_alias or getattr(value, "__module__", page) not in ("typing", "importlib", "pathlib"), name
        assert not name.startswith("_"), name
    names = {}
    exec(f"from {page} import *", names)
    assert {*names} - {"__builtins__"} == {*module.__all__} <= {*shown}


def test_tab_shows_what_a_user_starts_with():
    complete = rlcompleter.Completer(dict(jengine=jengine)).complete
    shown = {name: complete(f"jengine.{name[:3]}", 0) for name in ("Runner", "sweep", "extras")}
    assert shown == dict(Runner="jengine.Runner(", sweep="jengine.sweep(", extras="jengine.extras")
    assert {"Runner", "load_config", "load_model", "sweep"} <= {*jengine.__all__}
    assert not {"importlib", "Any", "logging"} & {*jengine.__all__}


def _copy(tmp_path, *without):
    """Return a directory with a package of links, which Python has compiled, to all parts but some extras."""
    extras = tmp_path / "jengine" / "extras"
    extras.mkdir(parents=True)
    for path in [*ROOT.iterdir(), *(ROOT / "extras").iterdir()]:
        if path.name not in ("__pycache__", "extras", *without):
            (tmp_path / path.relative_to(ROOT.parent)).symlink_to(path)
    return tmp_path


def _run(code, directory):
    return subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True)


IMPORT_ALL = """
import importlib
from jengine.config import plugins
for module in {modules}:
    importlib.import_module(module)
assert not {{*{deleted}}} & {{*plugins.list_extras()}}
for extra, provides in plugins.list_extras().items():
    for section, names in provides.items():
        for module in names.values():
            importlib.import_module(module)
print(sys.modules["jengine"].__file__)
"""


def _deletions():
    """Return sets of extras, closed under what requires them: for any two extras one has the first without the second."""
    random_extras = random.Random(0)
    pairs = {(a, b) for a, b in itertools.permutations(EXTRAS, 2) if a not in _provides(b).get("requires", {})}
    deletions = []
    while pairs:
        samples = []
        for _ in range(300):
            chosen = set(random_extras.sample(EXTRAS, len(EXTRAS) // 2))
            samples.append({e for e in EXTRAS if e in chosen or chosen & _provides(e).get("requires", {}).keys()})
        best = max(samples, key=lambda deleted: sum(a in deleted and b not in deleted for a, b in pairs))
        pairs = {(a, b) for a, b in pairs if not (a in best and b not in best)}
        deletions.append(sorted(best))
    return deletions


def test_an_extra_can_be_deleted(run_python, tmp_path):
    for index, deleted in enumerate(_deletions()):
        places = (*ROOMS, *(f"extras/{extra}" for extra in EXTRAS if extra not in deleted))
        modules = [m for m in _modules() if _place(f"{m}.x") in places and "__main__" not in m]
        directory = _copy(tmp_path / str(index), *deleted)
        done = run_python(IMPORT_ALL.format(modules=modules, deleted=deleted), cwd=directory)
        assert done.stdout == f"{directory / 'jengine' / '__init__.py'}\n", done.stderr


def test_the_core_trains_the_config_of_the_demo_with_a_class_of_the_user_without_extras(tmp_path):
    directory = _copy(tmp_path)
    shutil.rmtree(directory / "jengine" / "extras")  # of links
    shutil.copy(ROOT.parent / "configs" / "digits_cnn.py", directory)
    (directory / "my_config.py").write_text(CONFIG)
    command = [sys.executable, "-m", "jengine", "train", "my_config.py", "--config.train_cfg.max_epochs=4"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (directory / "work_dirs" / "my_config" / "epoch_4").is_dir()
    assert list(directory.glob("work_dirs/my_config/*/vis_data/events.out.tfevents.*"))


CONFIG = '''
import digits_cnn
import flax.linen as nn


class MyNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(x.reshape(len(x), -1))


def get_config():
    config = digits_cnn.get_config()
    config.model.module = dict(type=MyNet)
    return config
'''


WITHOUT = {  # extra: code that needs it
    "selfsup": """
from jengine.config import HOOKS
try: HOOKS.get("SwAVHook")
except KeyError as error: print(error)
""",
    "mmengine": """
import pathlib
from jengine.config import load_config, write_config
from jengine.runner import Runner
pathlib.Path("flat.py").write_text("train_cfg = dict(max_epochs=1)")
pathlib.Path("cfg.json").write_text("{}")
for call in (
    lambda: load_config("flat.py"),
    lambda: load_config("cfg.json"),
    lambda: write_config({}, "cfg.yaml"),
    lambda: Runner.from_cfg(dict(model="m", work_dir="w", default_scope="mmdet")),
):
    try: call()
    except ValueError as error: print(error)
""",
    "cloud": """
from jengine.config.storage import storage_path
try: storage_path("work_dir", "gs://bucket/run")
except ValueError as error: print(error)
""",
    "augment": """
from jengine.data import IterableLoader
class Loader:
    __iter__ = lambda self: iter([1])
    __module__ = "torchdata.stateful_dataloader"
try: IterableLoader(type("MyLoader", (Loader,), {})(), train=True)
except ValueError as error: print(error)
""",
    "serving": """
from jengine.config.plugins import load_provided
try: load_provided("predict", "predict")
except KeyError as error: print(error)
""",
    "sweeps": """
import jengine
try: jengine.sweep
except AttributeError as error: print(error)
from jengine.cli import main
main(["sweep", "config.py"])
""",
}


@pytest.fixture(scope="module")
def printed(run_python, tmp_path_factory):
    """What the code that needs an extra prints without it, by extra."""
    done = {extra: run_python(code, cwd=_copy(tmp_path_factory.mktemp(extra), extra)) for extra, code in WITHOUT.items()}
    return {extra: found.stdout + found.stderr for extra, found in done.items()}


def test_a_name_of_a_deleted_extra_is_explained(printed):
    assert "'SwAVHook'; it is in the extra 'selfsup', which is not installed" in printed["selfsup"]


def test_flat_files_other_suffixes_and_keys_of_mmengine_need_the_extra_for_them(printed):
    lines = printed["mmengine"].splitlines()
    assert "flat.py' has no function `get_config()`" in lines[0], lines
    assert "a config must be a Python file, or of a kind that an extra reads, got '" in lines[1]
    assert "a config must be written to a Python file, or to a kind that an extra writes, got cfg.yaml" in lines[2]
    assert "'default_scope'" in lines[3], lines[3]


def test_a_url_is_refused_without_an_extra_for_its_scheme(printed):
    wanted = "`work_dir` must be a local path or a URL of an installed extra, got 'gs://bucket/run'; mount other storage as a directory"
    assert wanted in printed["cloud"]


def test_loaders_of_other_libraries_are_refused_without_an_extra_for_their_positions(printed):
    assert "a dataloader of torchdata needs an extra that reads its position, got MyLoader" in printed["augment"]


def test_a_prediction_without_the_extra_for_it_names_the_extra(printed):
    wanted = "no extra provides 'predict' in predict; it is in the extra 'serving', which is not installed"
    assert wanted in printed["serving"]


def test_a_command_and_a_function_of_a_deleted_extra_are_explained(printed):
    function, command = printed["sweeps"].split("jengine: error: ", 1)
    assert "it is in the extra 'sweeps', which is not installed" in function
    assert "invalid choice: 'sweep'; it is in the extra 'sweeps', which is not installed" in command


def _loaded_after(code, modules):
    """Return the `modules` that are loaded after running `code` in a new process."""
    script = f"import sys; {code}; print(*[m for m in {modules} if m in sys.modules])"
    return _run(script, ROOT.parent).stdout.split()


def test_importing_jengine_loads_no_heavy_library():
    heavy = ("jax", "flax", "optax", "orbax", "grain", "numpy", "ml_collections", "rich")
    assert _loaded_after("import jengine", heavy) == []


OPTIONAL = (
    "orbax.checkpoint", "grain", "tensorboard", "matplotlib", "sklearn", "wandb", "mlflow", "aim", "clearml", "comet_ml", "PIL", "torch",
    "tensorflow",
)  # fmt: skip
SMALLEST_RUN = """
import sys
import flax.linen as nn
import numpy as np
from jengine import Runner
count = lambda: len([name for name in sys.modules if name.startswith("jengine")])
print([name for name in {optional} if name in sys.modules])
print(count())
from jengine.data import ArrayDataset
from jengine.model import CrossEntropy, LinenModel
class Net(nn.Module):
    @nn.compact
    def __call__(self, x): return nn.Dense(2)(x)
data = ArrayDataset(dict(x=np.zeros((8, 3), "f"), y=np.zeros(8, "i")))
Runner(
    LinenModel(Net(), inputs="x", loss=CrossEntropy(label="y")),
    "run",
    train_dataloader=dict(batch_size=4, dataset=data),
    train_cfg=dict(max_epochs=1),
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
    log_level="ERROR",
).train()
print(count())
"""


def test_the_smallest_run_imports_a_part_of_the_package_and_the_runner_no_optional_library(tmp_path):
    code = SMALLEST_RUN.replace("{optional}", str(OPTIONAL))
    environ = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
    optional, at_import, trained = done.stdout.splitlines()[-3:]
    assert optional == "[]", done
    assert int(at_import) <= 180, done
    assert int(trained) <= 215, done
