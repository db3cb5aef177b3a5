"""Run the page on iMIX from top to bottom."""

import pytest


def test_page_on_imix_runs_from_top_to_bottom(run_page):
    pytest.importorskip("sklearn")
    assert run_page("imix.md")
