"""Fixtures of the core's tests, for the tests of extras."""

from tests.checkpoint.conftest import checkpointer as checkpointer
from tests.checkpoint.conftest import state as state
from tests.config.conftest import write as write
from tests.hooks.conftest import runner as runner
from tests.parallel.conftest import assert_close as assert_close
from tests.parallel.conftest import make_run as make_run
from tests.runner.conftest import make_runner as make_runner
