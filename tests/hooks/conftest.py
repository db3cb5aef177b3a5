import pytest

from tests.runner_fixture import QuickRunner


@pytest.fixture
def runner(tmp_path):
    """Return a real Runner with ten iterations, ready to train, whose stages the test calls."""
    runner = QuickRunner(tmp_path / "run", [], epochs=1, epoch_length=10)
    runner.prepare_training()
    return runner
