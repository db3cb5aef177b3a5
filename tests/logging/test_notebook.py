import sys
import types

import pytest

from jengine.logging import format_table
from jengine.logging.console import in_notebook

pytest.importorskip("IPython")


def colab_shell():
    """Return a shell whose class has the name of Colab's, with the kernel that shells of all kernels have."""
    shell = type("Shell", (), {"__module__": "google.colab._shell", "kernel": None})
    return shell()


@pytest.fixture(params=["ipykernel", "colab", "terminal"])
def shell(request, monkeypatch):
    import IPython

    kinds = {
        "ipykernel": types.SimpleNamespace(kernel=None),
        "colab": colab_shell(),
        "terminal": types.SimpleNamespace(),
    }
    monkeypatch.setattr(IPython, "get_ipython", lambda: kinds[request.param])
    monkeypatch.setattr("builtins.get_ipython", lambda: kinds[request.param], raising=False)  # what rich asks
    return request.param


def test_a_kernel_is_recognized_and_tables_are_text_in_all_of_them(shell, capsys):
    assert in_notebook() == (shell != "terminal")
    assert format_table(["a"], [[1]]).splitlines()[-2] == "| 1 |"
    assert capsys.readouterr().out == ""


def test_without_ipython_there_is_no_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
