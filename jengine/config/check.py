"""Unknown keys of one level of a config, found before anything is built from it."""

from collections.abc import Iterable

from jengine.errors import ConfigError, closest, current_config_path


def check_keys(cfg: Iterable[str], known: Iterable[str], hint: str = "") -> None:
    """Refuses a key that nobody would read.

    Args:
      cfg: the keys of one level (a dict or a ConfigDict will do).
      known: the legal keys of that level.
      hint: what to say besides, in a few words, such as where a user's own values belong.

    Raises:
      ConfigError: an unknown key, with the closest legal one.
    """
    names = set(known)
    for key in cfg:
        if key not in names:
            level = f"`{current_config_path()}`" if current_config_path() else "the top level of the config"
            raise ConfigError(f"unknown key {key!r} at {level}{closest(str(key), names)}{f' ({hint})' if hint else ''}")
