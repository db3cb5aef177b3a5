import pathlib
import textwrap
from collections.abc import Callable

import pytest


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Callable[[str, str], pathlib.Path]:
    """Writes a file below the test's own directory and returns its path."""

    def write_file(name: str, text: str) -> pathlib.Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write_file
