"""Write what follows from the pages of packages and from what they provide.

* `jengine/extras/names.json`: the names of each extra, for the error when it was deleted;
* a stub `__init__.pyi` beside each page: also the names that are imported on use, for editors and
  type checkers.
"""

import ast
import importlib
import inspect
import json
import pathlib

from jengine.config.plugins import find_modules, list_extras, provided

ROOT = pathlib.Path(__file__).parent.parent / "jengine"
HEADER = "# Written by .ci/extras_names.py, for editors and type checkers."


def main() -> None:
    """Write the files."""
    for path, text in make_files().items():
        path.write_text(text)


def make_files() -> dict[pathlib.Path, str]:
    """Return the text of each file."""
    names = {
        extra: sorted({n for section, d in provides.items() if section != "requires" for n in d})
        for extra, provides in list_extras().items()
    }
    entries = {extra: found for extra, found in names.items() if found}
    files = {ROOT / "extras" / "names.json": json.dumps(entries, indent=1) + "\n"}
    for path in sorted(ROOT.rglob("__init__.py")):
        page = ".".join(("jengine", *path.parent.relative_to(ROOT).parts))
        if "__dir__" in vars(importlib.import_module(page)):
            files[path.with_suffix(".pyi")] = _make_stub(page, ast.parse(path.read_text()))
    return files


def _make_stub(page: str, tree: ast.Module) -> str:
    """Return the stub of a page: what it imports, and what it imports on use."""
    module = importlib.import_module(page)
    provides = {"names": module._NAMES} if page == "jengine" else getattr(module, "provides", {})
    owners = {**provided(page), **find_modules(provides)}
    lines = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.asname and (alias.asname[0] != "_" or alias.asname.startswith("__")):
                    lines[alias.asname] = _import(node.module, alias.name)
    for name in sorted({*dir(module)} - {*lines}):
        value = getattr(module, name)
        if inspect.ismodule(value):
            lines[name] = _import(page, name)
            continue
        owner = owners.get(name, getattr(value, "__module__", ""))
        if name in _list_defined(owner):
            lines[name] = _import(owner, name)
        else:  # a class that is made of another, such as that of a scheduler
            base = value.__mro__[1]
            lines[name] = _describe(name, base, inspect.signature(value))
            lines.setdefault(base.__name__, f"from {base.__module__} import {base.__name__}")
            lines["Any"] = "from typing import Any"
    if page == "jengine":
        lines["_REGISTERED_BY"] = "_REGISTERED_BY: dict[str, str]"
    imports = sorted(line for line in lines.values() if line.startswith("from"))
    rest = [line for line in lines.values() if not line.startswith("from")]
    return "\n".join([HEADER, "", *imports, *([""] if rest else []), *rest, ""])


def _import(module: str | None, name: str) -> str:
    return f"from {module} import {name} as {name}"


def _list_defined(module: str) -> set[str]:
    """Return the names that the source of a module defines or imports."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    names = {alias.name for x in tree.body if isinstance(x, ast.ImportFrom) for alias in x.names}
    names |= {x.name for x in tree.body if isinstance(x, ast.ClassDef | ast.FunctionDef)}
    targets = [x.targets[0] for x in tree.body if isinstance(x, ast.Assign)]
    targets += [x.target for x in tree.body if isinstance(x, ast.AnnAssign)]
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def _describe(name: str, base: type, signature: inspect.Signature) -> str:
    """Return a class whose arguments may have any type."""
    parameters = ["self"]
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        default = "" if parameter.default is parameter.empty else " = ..."
        parameters.append(f"{parameter.name}: Any{default}")
    init = f"    def __init__({', '.join(parameters)}) -> None: ..."
    return f"class {name}({base.__name__}):\n{init}"


if __name__ == "__main__":
    main()
