"""What further backends of logs refuse: a call, its error, and the words that must be in the message."""

import sys

import pytest

from jengine.extras.trackers import CSVVisBackend, MLflowVisBackend, WandbVisBackend
from tests.refusals import check_row


def write_without(package, monkeypatch, backend, method, *arguments):
    monkeypatch.setitem(sys.modules, package, None)
    getattr(backend, method)(*arguments)


REFUSED = {
    "a file of another kind": (lambda tmp_path: CSVVisBackend(tmp_path, scalar_save_file="scalars.json"), ValueError, "`scalar_save_file`", ".csv", "'scalars.json'"),
    **{
        f"{call[0]} without {extra}": (
            lambda tmp_path, monkeypatch, backend=backend, package=package, call=call: write_without(package, monkeypatch, backend(tmp_path), *call),
            ImportError, f"pip install 'jengine[{extra}]'",
        )
        for backend, package, extra in ((MLflowVisBackend, "mlflow.tracking", "mlflow"), (WandbVisBackend, "wandb", "wandb"))
        for call in (("add_scalar", "a", 1.0), ("add_config", ""))  # at the start of a run, not at its end
    },
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_tracked_is_refused(row, request):
    check_row(request, *row)
