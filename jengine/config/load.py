"""Config files: Python files with a function `get_config()`, and those that extras read."""

import logging
import os
import pathlib
import re
import sys
import types
from collections.abc import Iterable
from typing import Any

from jengine.config.containers import is_level
from jengine.config.errors import ConfigError, did_you_mean
from jengine.config.frames import boundary
from jengine.config.modules import (
    add_config_module,
    import_listed,
    importable,
    is_free,
)
from jengine.config.overrides import apply_overrides
from jengine.config.plugins import load_each, load_provided
from jengine.config.storage import is_url

logger = logging.getLogger("jengine")
_PACKAGE = pathlib.Path(__file__).parent.parent
# for config files that share a name with another module: not importable
MODULE_PREFIX = "_jengine_config_"


@boundary
def load_config(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Any:
    """Run a config file and apply overrides to the config that `get_config()` returns.

    A file without this function, or with another suffix, is one for the `config_loaders` of the
    extras. The file can import modules from the same directory, and name them in types:
    'my_net.MyCNN'.

    Args:
      path: the file, or a URL such as `gs://bucket/config.py`. `path.py:argument` passes the string
        `argument` to `get_config`. `configs/NAME.py` is also found among the configs that jengine
        ships if it does not exist.
      overrides: such as `optim_wrapper.optimizer.lr=0.1`; see `apply_overrides`.

    Returns:
      A new ConfigDict; references stay references, and keys may have dots.

    Raises:
      FileNotFoundError: it does not exist; the message names similar ones.
      ConfigError: another kind of file, no `get_config`, a `get_config` that does not return a
        config or does not take the argument, or an invalid override. Other errors in the file,
        such as that of ml_collections for a key with a dot, keep the same type and get a note.

    >>> load_config("configs/digits_cnn.py", ["train_cfg.max_epochs=2"]).train_cfg.max_epochs
    2
    """
    file, argument = find_config_file(path)
    # Modules beside the config can be imported while it runs, and by its classes later, without
    # PYTHONPATH.
    with importable(file.parent):
        try:
            cfg = _run(file, argument)
        except Exception as error:
            error.add_note(f"while loading the config file {str(file)!r}")
            if isinstance(error, ModuleNotFoundError):
                error.add_note(
                    f"{error.name!r} must be installed for this Python, {sys.executable}, or, if "
                    "it is a file of your own, be next to the config file or in a directory of "
                    "PYTHONPATH; or correct the name"
                )
            raise
        if not is_level(cfg):
            raise ConfigError(
                f"get_config() of {str(file)!r} must return a ConfigDict or a dict, got "
                + ("None; is a `return` missing at its end?" if cfg is None else type(cfg).__name__)
            )
    return apply_overrides(cfg, overrides)


def find_config_file(path: str | os.PathLike[str]) -> tuple[pathlib.Path, str | None]:
    """Return the config file, perhaps one that jengine ships, and the argument for `get_config`."""
    name, colon, argument = os.fspath(path).partition(".py:")
    name = f"{name}.py" if colon else name
    if is_url(name):
        file = load_provided("url_files", "fetch_config")(name)
    else:
        file = pathlib.Path(name).expanduser()
    if not file.exists() and (shipped := list_shipped().get(file)) is not None:
        logger.warning(
            "%s does not exist in this directory; using the config of this name that jengine "
            "ships.",
            file,
        )
        file = shipped
    if not file.is_file():
        hint = did_you_mean(str(file), map(str, [*file.parent.glob("*.py"), *list_shipped()]))
        raise FileNotFoundError(f"the config file {str(file)!r} does not exist{hint}")
    # the same file through a link has the same modules
    return file.resolve(), argument if colon else None


def _run(file: pathlib.Path, argument: str | None) -> Any:
    name = (
        file.stem
        if is_free(file.stem, file)
        else MODULE_PREFIX + re.sub(r"\W", "_", str(file.with_suffix("")))
    )
    module = types.ModuleType(name)
    module.__file__ = str(file)
    add_config_module(file, module)  # dataclasses and pickle look up their module
    source = file.read_bytes()
    if file.suffix != ".py" or b"get_config" not in source:
        for load in load_each("config_loaders"):
            if (cfg := load(file, module)) is not None:
                if argument is not None:
                    raise ConfigError(
                        f"a flat config must have no argument, got {argument!r} for {str(file)!r}"
                    )
                return cfg
    if file.suffix != ".py":
        raise ConfigError(
            f"a config must be a Python file, or of a kind that an extra reads, got {str(file)!r}"
        )
    exec(compile(source, str(file), "exec"), module.__dict__)
    import_listed(vars(module).get("CONFIG_MODULES", {}), file)
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise ConfigError(f"{str(file)!r} has no function `get_config()`")
    arguments = () if argument is None else (argument,)
    return get_config(*arguments)


def list_shipped() -> dict[pathlib.Path, pathlib.Path]:
    """Return the config files that jengine ships by the path that works in every directory,
    `configs/NAME.py`.
    """
    directories = _PACKAGE / "configs", _PACKAGE.parent / "configs"  # of a wheel and of a clone
    directory = next(filter(pathlib.Path.is_dir, directories), None)
    return (
        {pathlib.Path("configs", file.name): file for file in sorted(directory.glob("*.py"))}
        if directory
        else {}
    )
