"""Config with MMEngine's methods: loaded, changed by dotted paths, compared and written."""

import functools
import os
import pathlib
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any, Self

from ml_collections import ConfigDict

from jengine.config.containers import (
    ConfigLike,
    Key,
    add_attributes,
    is_level,
    iter_items,
    resolve,
    to_config_dict,
)
from jengine.config.diff import ABSENT, diff_configs
from jengine.config.dump import dump_config, write_config
from jengine.config.load import load_config
from jengine.config.merge import merge_into
from jengine.config.overrides import set_path


class ConfigLevel(ConfigDict):
    """One level of a `Config`, which also has methods of a dict that ml_collections leaves out.

    >>> level = Config({"optimizer": {"lr": 0.1}}).optimizer
    >>> level.setdefault("momentum", 0.9), level.pop("lr"), level == {"momentum": 0.9}
    (0.9, 0.1, True)
    """

    def pop(self, key: Key, default: Any = None) -> Any:
        """Remove a key and return the value, or `default` if there is none."""
        value = self.get(key, default)
        if key in self:
            del self[key]
        return value

    def setdefault(self, key: Key, default: Any = None) -> Any:
        """Return the value of a key, which is set to `default` if there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def merge(self, other: ConfigLike) -> None:
        """Merge a config into this one, by the rules of `jengine.config.merge`."""
        merge_into(self, resolve(other))

    def copy(self) -> "ConfigLevel":
        """Return a copy, in which references refer to each other, but not to this config."""
        return to_config_dict(self, kind=ConfigLevel)

    def __setitem__(self, key: Key, value: Any) -> None:
        """Set a value; the keys of dicts, also of those in lists, become attributes."""
        if is_level(value) and not isinstance(value, ConfigLevel):
            value = to_config_dict(value, kind=ConfigLevel)
        super().__setitem__(key, add_attributes(value))

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is a dict or a ConfigDict with equal values."""
        return is_level(other) and resolve(self) == resolve(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values: ml_collections would lose keys with dots, and the order."""
        return functools.partial(to_config_dict, kind=ConfigLevel), (resolve(self),)


class Config(ConfigLevel):
    """ConfigDict with the methods of MMEngine's Config.

    Every function that takes a config takes it too.

    >>> cfg = Config({"train_cfg": {"max_epochs": 3}, "custom_hooks": [{"type": "EMAHook"}]})
    >>> cfg.merge_from_dict({"train_cfg.max_epochs": 5, "custom_hooks.0.momentum": 0.1})
    >>> cfg.train_cfg.max_epochs, cfg.custom_hooks[0].momentum
    (5, 0.1)

    Args:
      cfg: a dict or a ConfigDict, which is copied; None for an empty config.
      filename: the file that it was loaded from.

    Raises:
      TypeError: `cfg` is no config.
    """

    def __init__(
        self, cfg: ConfigLike | None = None, filename: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__(type_safe=False, allow_dotted_keys=True, sort_keys=False)
        object.__setattr__(self, "_filename", None if filename is None else os.fspath(filename))
        cfg = {} if cfg is None else cfg
        if not is_level(cfg):
            raise TypeError(
                f"a config must be a ConfigDict or a dict, got {type(cfg).__name__}: {cfg!r}"
            )
        for key, value in iter_items(to_config_dict(cfg, kind=ConfigLevel)):
            self[key] = value

    @classmethod
    def fromfile(cls, filename: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Self:
        """Return the config in a file; arguments and errors as in `load_config`."""
        return cls(load_config(filename, overrides), filename)

    @classmethod
    def fromstring(cls, cfg_str: str, file_format: str = ".py") -> Self:
        """Return the config in the text of a file with the suffix `file_format`: '.py', '.json' or
        '.yaml'.

        >>> Config.fromstring('{"train_cfg": {"max_epochs": 3}}', ".json").train_cfg.max_epochs
        3
        """
        with tempfile.TemporaryDirectory() as directory:
            file = pathlib.Path(directory, f"config_from_string{file_format}")
            file.write_text(cfg_str, encoding="utf-8")
            return cls(load_config(file))

    @staticmethod
    def diff(first: ConfigLike | str, second: ConfigLike | str) -> str:
        """Return a line for each value that only one of two configs, or config files, has.

        >>> print(Config.diff({"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 0}))
        - lr = 0.1 + lr = 0.2
        """
        one, two = (load_config(cfg) if isinstance(cfg, str) else cfg for cfg in (first, second))
        return "\n".join(
            f"{sign} {path} = {value!r}"
            for path, values in diff_configs(one, two).items()
            for sign, value in zip("-+", values, strict=True)
            if value is not ABSENT
        )

    @property
    def filename(self) -> str | None:
        """The file that the config was loaded from; None for others."""
        return self._filename

    @property
    def pretty_text(self) -> str:
        """The text of a Python file that loads as this config, see `dump_config`."""
        return dump_config(self)

    def dump(self, file: str | os.PathLike[str] | None = None) -> str | None:
        """Write a Python, JSON or YAML file, see `write_config`.

        Without `file` return the text of a Python file.
        """
        if file is None:
            return self.pretty_text
        write_config(self, file)
        return None

    def merge_from_dict(self, options: Mapping[str, Any]) -> None:
        """Set the values at dotted paths, such as `{'train_cfg.max_epochs': 5,
        'custom_hooks.0.momentum': 0.1}`.

        A dict merges with an existing one, see `merge`; any other value replaces the old one.

        Raises:
          ConfigError: a path through a value that is not a dict or a list, or an index out of
            range.
        """
        for path, value in options.items():
            set_path(self, path, value)

    def copy(self) -> Self:
        """Return a copy, in which references refer to each other, but not to this config."""
        return type(self)(self, self.filename)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values and the file name."""
        return type(self), (resolve(self), self.filename)
