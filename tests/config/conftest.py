import pathlib
import textwrap
from collections.abc import Callable

import pytest


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Callable[[str, str], pathlib.Path]:
    """Return a function that writes a file in the directory of the test and returns its path."""

    def write_file(name: str, text: str) -> pathlib.Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write_file
