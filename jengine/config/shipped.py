"""Config files that jengine ships, so `configs/digits_cnn.py` works in every directory."""

import pathlib

_PACKAGE = pathlib.Path(__file__).parent.parent


def list_shipped() -> dict[pathlib.Path, pathlib.Path]:
    """Return the shipped config files by the path under which they are found, `configs/NAME.py`."""
    directories = _PACKAGE / "configs", _PACKAGE.parent / "configs"  # of a wheel and of a clone
    directory = next(filter(pathlib.Path.is_dir, directories), None)
    return {pathlib.Path("configs", file.name): file for file in sorted(directory.glob("*.py"))} if directory else {}
