"""Flat config files, as MMEngine's documentation writes them: each top-level assignment is a
config key. JSON and YAML files are flat too.
"""

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import logging
import operator
import os
import pathlib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jengine.config.containers import AttributeDict, resolve
from jengine.config.dump import parse_config, parse_modules
from jengine.config.errors import ConfigError, UnknownNameError, did_you_mean
from jengine.config.merge import merge_into
from jengine.config.modules import import_listed
from jengine.config.plugins import load_provided
from jengine.extras.mmengine.mmengine_keys import SECTIONS, WITHOUT_EFFECT

DATA_SUFFIXES = (".json", ".yaml", ".yml")
_MISSPELLED = 0.8  # the least similarity of a misspelled section to its name
_LOGGER = logging.getLogger("jengine")
_FILE_VARIABLE = re.compile(
    r"\{\{\s*(fileDirname|fileBasenameNoExtension|fileBasename|fileExtname)\s*\}\}"
)
_ENVIRONMENT_VARIABLE = re.compile(
    r"""\{\{\s*['"]?\s*\$\s*(\w+)\s*:\s*([^\s'"}]*)\s*['"]?\s*\}\}"""
)
_BASE_VARIABLE = re.compile(r"\{\{\s*_base_\.([\w.]+)\s*\}\}")
# Packages with PyTorch code, whose classes are named in a config, but not imported: the registries
# have others.
_NAMED_ONLY = re.compile(r"(mm\w+|torch|torchvision)(\.|$)")


class Level(AttributeDict):
    """Config level in a flat file, which merges instead of replacing."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Merge further keys into this level, by the inheritance rules.

        MMEngine also calls it `merge`.
        """
        merge_into(self, resolve(dict(*args, **kwargs)))

    merge = update


@dataclasses.dataclass
class FlatConfig:
    """Variables in a flat config file, merged with those in the files that it inherits from."""

    values: Level = dataclasses.field(default_factory=Level)  # by name
    # what `import *` of the file gives besides
    names: dict[str, Any] = dataclasses.field(default_factory=dict)
    read: set[str] = dataclasses.field(default_factory=set)  # names that a file reads
    # set again, after the file that reads them has run
    set_too_late: set[str] = dataclasses.field(default_factory=set)

    def has_sections(self) -> bool:
        """Return whether a variable is a config section, or a misspelled one."""
        return any(did_you_mean(key, SECTIONS, _MISSPELLED) for key in self.values)

    def to_config(self, name: str) -> dict[str, Any]:
        """Return the config: sections as they are, other variables under `vars`.

        A variable that no file reads is an error in the Runner if it resembles a section. Otherwise
        the log, with the file `name`, warns of it, and of a base file's variable that is set too
        late to change anything.
        """
        moved = ("data_preprocessor", "activation_checkpointing")
        known = [*SECTIONS, *moved, *(key for key in WITHOUT_EFFECT if "." not in key)]
        if "vis_backends" in self.read - self.set_too_late:  # a variable, which `visualizer` reads
            known.remove("vis_backends")
        cfg = {}
        own = {}
        unread = []
        for key, value in self.values.items():
            if key in known or (key not in self.read and did_you_mean(key, known, _MISSPELLED)):
                cfg[key] = value
            else:
                own[key] = value
                if key not in self.read:
                    unread.append(key)
        if unread:
            _LOGGER.warning("%s: nothing reads %s, which go to `vars`.", name, ", ".join(unread))
        # None takes back what a base file has
        set_late = [key for key in self.set_too_late if self.values.get(key) is not None]
        if late := sorted(set(set_late) - set(SECTIONS)):
            _LOGGER.warning(
                "%s: setting %s has no effect, because a base file has already read the old value; "
                "set the keys of the sections instead.",
                name,
                ", ".join(late),
            )
        if own:
            cfg["vars"] = {**own, **cfg.get("vars", {})}
        return cfg


def load_flat_config(file: pathlib.Path, module: types.ModuleType) -> Any:
    """Run a flat config file in `module`, and return the config; None for a file of another kind.

    Raises:
      ConfigError: it has no variable with the name of a section.
    """
    if file.suffix not in (".py", *DATA_SUFFIXES):
        return None
    flat = load_flat(file, module)
    import_listed(vars(module).get("CONFIG_MODULES", {}), file)
    if callable(get_config := vars(module).get("get_config")):  # of `from base import *`
        return get_config()
    import_custom(flat.values)
    if not flat.has_sections():
        raise ConfigError(
            f"{str(file)!r} has no function `get_config()`, and no variable such as `train_cfg`"
        )
    return flat.to_config(file.name)


def format_data(text: str, suffix: str) -> str | None:
    """Return the text of a config in Python as JSON or YAML; None for another suffix."""
    if suffix not in DATA_SUFFIXES:
        return None
    modules = parse_modules(text)
    # By way of the Python text, so that all formats say the same and have one set of rules.
    plain = ({"CONFIG_MODULES": modules} if modules else {}) | parse_config(text, arrays=False)
    if suffix == ".json":
        return json.dumps(plain, indent=2) + "\n"
    import yaml

    return yaml.safe_dump(plain, sort_keys=False)


def load_flat(
    file: pathlib.Path, module: types.ModuleType, heirs: Sequence[pathlib.Path] = ()
) -> FlatConfig:
    """Run a flat config file, after the files that it inherits from.

    A file inherits by `_base_ = [...]`, whose keys are merged, or by imports within `with
    read_base():`. It may contain `{{ fileDirname }}`, `{{ fileBasename }}`, `{{
    fileBasenameNoExtension }}`, `{{ fileExtname }}`, `{{ $VARIABLE:default }}` and `{{ _base_.key
    }}`. An import from a package with PyTorch code gives a name, which is looked up in the
    registries.

    Args:
      file: absolute path.
      module: the module to run it in.
      heirs: the files that inherit from it.

    Raises:
      ConfigError: a base file that does not exist or inherits from itself, or two with the same
        key. Other errors in the file keep the same type.
    """
    if file in heirs:
        raise ConfigError(
            "a config file must not inherit from itself, got "
            f"{' -> '.join(map(str, [*heirs, file]))}"
        )
    if file.suffix in DATA_SUFFIXES:
        return _load_data(file, module, heirs)
    tree = ast.parse(_substitute(file.read_text(encoding="utf-8"), file), str(file))
    result = FlatConfig()
    _pop_named_only(tree, module)
    _inherit(result, _pop_bases(tree), file, heirs)
    for base, names in _pop_read_base(tree, file):
        inherited = _load_base(base, [*heirs, file])
        if "*" in names:
            vars(module).update(inherited.names)
            names = {name: name for name in inherited.values}
        _add(result, inherited, names)
        # later lines of the file read them
        vars(module).update({name: result.values[name] for name in names})
    # Quoted or not, `{{ _base_.a }}` is no Python that would run: it becomes an expression first.
    tree = ast.fix_missing_locations(_BaseVariables(result.values).visit(tree))
    read = set(_names_read(tree))
    imported = dict(vars(module))
    vars(module)["_base_"] = result.values  # expressions such as `_base_.train_cfg` read it
    exec(compile(tree, str(file), "exec"), module.__dict__)
    if deprecation := vars(module).get("_deprecation_"):
        _LOGGER.warning(
            "%s is deprecated: %s", file, ", ".join(f"{key} {x}" for key, x in deprecation.items())
        )
    own = {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_")
        and not (key in imported and value is imported[key])
        and not isinstance(value, types.ModuleType | types.FunctionType | type)
    }
    result.names = {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_") and key not in own
    }
    result.set_too_late = (result.set_too_late | (own.keys() & result.read)) - read
    result.read |= read
    # assigned again after `read_base`: replaced, as in any Python file
    for key in own.keys() & imported.keys():
        result.values.pop(key, None)
    _merge(result, resolve(own))
    return result


def _merge(result: FlatConfig, own: dict[str, Any]) -> None:
    """Merge a file's keys into those that it inherits; `dict(_delete_=True)` alone unsets a key."""
    for key in [key for key, value in own.items() if value == {"_delete_": True}]:
        result.values.pop(key, None)
        del own[key]
    merge_into(result.values, own)
    result.values = _to_levels(result.values)


def _load_data(
    file: pathlib.Path, module: types.ModuleType, heirs: Sequence[pathlib.Path]
) -> FlatConfig:
    """Return the keys in a JSON or YAML file, merged with those of its `_base_` files."""
    text = _substitute(file.read_text(encoding="utf-8"), file)
    result = FlatConfig()
    try:
        if file.suffix == ".json":
            values = json.loads(text)
        else:
            import yaml

            values = yaml.safe_load(text)
    except RecursionError:
        raise ConfigError(
            f"a config file must not be nested so deeply, got {str(file)!r}"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"a config file must contain a dict, got {type(values).__name__} in {str(file)!r}"
        )
    _inherit(result, values.pop("_base_", []), file, heirs)
    vars(module)["CONFIG_MODULES"] = values.pop("CONFIG_MODULES", {})
    # Variables of the base are filled in before merging, when they still have the base's values.
    _merge(result, resolve(_fill_base_variables(values, result.values)))
    return result


def _fill_base_variables(value: Any, base: Level) -> Any:
    if isinstance(value, dict):
        return {key: _fill_base_variables(item, base) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill_base_variables(item, base) for item in value]
    if isinstance(value, str) and (match := _BASE_VARIABLE.fullmatch(value)):
        return operator.attrgetter(match[1])(_to_levels(base))
    return value


def _inherit(
    result: FlatConfig,
    bases: str | Sequence[str],
    file: pathlib.Path,
    heirs: Sequence[pathlib.Path],
) -> None:
    """Add the keys of one or several base files, which must differ."""
    for name in [bases] if isinstance(bases, str) else bases:
        inherited = _load_base(_find_base(name, file), [*heirs, file])
        # Which of two bases wins would depend on their order, as in no other config system;
        # MMEngine refuses it too.
        if duplicates := sorted(inherited.values.keys() & result.values.keys()):
            raise ConfigError(
                f"the files in `_base_` of {str(file)!r} must have different keys, got "
                f"{duplicates} twice"
            )
        _add(result, inherited, {name: name for name in inherited.values})


def import_custom(cfg: dict[str, Any]) -> None:
    """Import the modules that MMEngine's `custom_imports` lists, and remove the key."""
    custom = cfg.pop("custom_imports", None)
    if custom is None:
        return
    if isinstance(custom, tuple) and len(custom) == 1:
        raise ConfigError(
            "`custom_imports` must be a dict, got a tuple of one; remove the comma after "
            "`dict(...)`"
        )
    listed = custom.get("imports", ()) if hasattr(custom, "items") else None
    names = [listed] if isinstance(listed, str) else listed
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"`custom_imports` must be dict(imports=[names of modules]), got {custom!r}"
        )
    allows_failure = custom.get("allow_failed_imports", False)
    if not isinstance(allows_failure, bool):
        raise TypeError(
            f"`custom_imports.allow_failed_imports` must be True or False, got {allows_failure!r}"
        )
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            if not allows_failure:
                raise
            _LOGGER.warning("The module %s of `custom_imports` cannot be imported: %s", name, error)


def _add(result: FlatConfig, inherited: FlatConfig, names: Mapping[str, str]) -> None:
    """Add variables of a base file, by the name here the name there."""
    for name, original in names.items():
        if original not in inherited.values:
            raise ConfigError(
                "the base file has no variable "
                f"{original!r}{did_you_mean(original, inherited.values)}"
            )
        result.values[name] = inherited.values[original]
    result.read |= inherited.read
    result.set_too_late |= inherited.set_too_late


def _load_base(file: pathlib.Path, heirs: Sequence[pathlib.Path]) -> FlatConfig:
    with contextlib.suppress(FileNotFoundError, UnknownNameError):  # without the extra for URLs
        load_provided("url_files", "fetch_base")(file)
    if not file.is_file() or file.suffix not in (".py", *DATA_SUFFIXES):
        near = [str(other) for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ConfigError(
            f"a base file of {str(heirs[-1])!r} must be a Python, JSON or YAML file, got "
            f"{str(file)!r}{did_you_mean(str(file), near)}"
        )
    module = types.ModuleType(f"_jengine_base_{file.stem}")
    module.__file__ = str(file)
    flat = load_flat(file, module, heirs)
    if callable(get_config := vars(module).get("get_config")):
        flat.values = _to_levels(resolve(get_config()))
    return flat


def _substitute(text: str, file: pathlib.Path) -> str:
    """Replace predefined and environment variables in a config file's text."""
    predefined = {
        "fileDirname": file.parent.as_posix(),
        "fileBasename": file.name,
        "fileBasenameNoExtension": file.stem,
        "fileExtname": file.suffix,
    }

    def environment(match: re.Match[str]) -> str:
        name, default = match.groups()
        if name not in os.environ and not default:
            raise ConfigError(
                f"the environment variable {name!r} must be set for {str(file)!r}, or have a "
                "default"
            )
        return os.environ.get(name, default)

    return _ENVIRONMENT_VARIABLE.sub(
        environment, _FILE_VARIABLE.sub(lambda match: predefined[match[1]], text)
    )


def _pop_bases(tree: ast.Module) -> str | list[str]:
    """Remove the assignment of `_base_`, and return its value."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="_base_")], value=value):
                tree.body.remove(node)
                return ast.literal_eval(value)
    return []


class _ForeignName(str):
    """Name of a PyTorch class, whose attributes are the names in it: `torch.optim.SGD` is 'SGD'."""

    def __getattr__(self, name: str) -> "_ForeignName":
        if name.startswith("__"):
            raise AttributeError(name)
        return _ForeignName(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ConfigError, since a config can only name what PyTorch has."""
        raise ConfigError(
            f"a config can name {str(self)!r} of PyTorch, not call it: `dict(type={self!s}, ...)`"
        )


def _pop_named_only(tree: ast.Module, module: types.ModuleType) -> None:
    """Replace imports of PyTorch packages, which may not be installed, by variables that hold
    the names.
    """
    for node in list(tree.body):
        match node:
            case ast.Import(names=names) if any(_NAMED_ONLY.match(alias.name) for alias in names):
                foreign = [alias for alias in names if _NAMED_ONLY.match(alias.name)]
                vars(module).update(
                    {
                        alias.asname or alias.name.partition(".")[0]: _ForeignName(alias.name)
                        for alias in foreign
                    }
                )
                node.names = [alias for alias in names if alias not in foreign]
                if not node.names:
                    tree.body.remove(node)
            case ast.ImportFrom(module=str(package), level=0, names=names) if _NAMED_ONLY.match(
                package
            ):
                tree.body.remove(node)
                vars(module).update(
                    {alias.asname or alias.name: _ForeignName(alias.name) for alias in names}
                )


def _find_base(name: str, file: pathlib.Path) -> pathlib.Path:
    """Return the path to a base file: relative to `file`, or `package::path` for one in an
    installed package.
    """
    package, separator, path = name.partition("::")
    if not separator:
        return pathlib.Path(os.path.normpath(file.parent / name))
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"a base file of {str(file)!r} must be a path, or the package must be installed, got "
            f"{name!r}; copy the file next to this one"
        )
    # Where OpenMMLab's packages put their configs when they are installed.
    return pathlib.Path(spec.origin).parent / ".mim" / "configs" / path


def _pop_read_base(
    tree: ast.Module, file: pathlib.Path
) -> list[tuple[pathlib.Path, dict[str, str]]]:
    """Remove the blocks `with read_base():`.

    Return the files and, by the name here, the names that they import.
    """
    imports = []
    for node in list(tree.body):
        match node:
            # The block is read, not run: its imports are files relative to this one, which no
            # Python package contains.
            case ast.With(
                items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="read_base")))],
                body=body,
            ):
                tree.body.remove(node)
                for line in body:
                    if not isinstance(line, ast.ImportFrom) or not line.level:
                        raise ConfigError(
                            f"a block `with read_base():` must have only relative imports, got "
                            f"{ast.unparse(line)!r} in {str(file)!r}"
                        )
                    path = (
                        file.parents[line.level - 1]
                        .joinpath(*(line.module or "").split("."))
                        .with_suffix(".py")
                    )
                    imports.append(
                        (path, {alias.asname or alias.name: alias.name for alias in line.names})
                    )
    return imports


class _BaseVariables(ast.NodeTransformer):
    """Transformer that replaces `{{ _base_.a.b }}` by the value in the base files, quoted or
    not.
    """

    def __init__(self, base: Level) -> None:
        self.base = base

    def visit_Set(self, node: ast.Set) -> ast.AST:
        match node:
            # `{{_base_.a.b}}` parses as a set in a set, so that a config of MMEngine is a Python
            # file without a preprocessor.
            case ast.Set(elts=[ast.Set(elts=[ast.Attribute() as inner])]):
                root: ast.expr = inner
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id == "_base_":
                    return inner
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, str) or "{{" not in node.value:
            return node
        if match := _BASE_VARIABLE.fullmatch(node.value):
            return ast.parse(f"_base_.{match[1]}", mode="eval").body
        return ast.Constant(
            _BASE_VARIABLE.sub(
                lambda match: str(operator.attrgetter(match[1])(self.base)), node.value
            )
        )


def _names_read(tree: ast.Module) -> Iterator[str]:
    """Yield the variables that a file reads, also those in base files."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                yield name
            case ast.Attribute(value=ast.Name(id="_base_"), attr=name):
                yield name
            case ast.Subscript(value=ast.Name(id="_base_"), slice=ast.Constant(value=str(name))):
                yield name


def _to_levels(value: Any) -> Any:
    if isinstance(value, dict):
        return Level({key: _to_levels(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_to_levels(item) for item in value)
    return str(value) if isinstance(value, _ForeignName) else value
