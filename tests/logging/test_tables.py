"""Plain-text tables: cells, alignment, errors."""

import pytest

from jengine.logging import format_table


def test_a_table_is_plain_text_of_any_width():
    rows = [["[a]", 1234567, 0.1, None], ["b", 1, 1e-5, "x" * 200]]
    lines = format_table(["group", "parameters", "lr", "note"], rows, title="Groups").splitlines()
    assert lines[0] == "Groups"
    assert lines[2].startswith("| group | parameters |    lr | note ")
    assert lines[4].startswith("| [a]   |  1,234,567 |   0.1 |      ")
    assert lines[5] == f"| b     |          1 | 1e-05 | {'x' * 200} |"


def test_a_table_aligns_as_told():
    lines = format_table(["a", "b"], [["x", 1], ["long", 22]], align=["right", "left"]).splitlines()
    assert lines[3:5] == ["|    x | 1  |", "| long | 22 |"]


def test_a_table_refuses_rows_of_another_length():
    with pytest.raises(ValueError, match="row 1 has 1 cells, the table has 2 columns"):
        format_table(["a", "b"], [[1, 2], [3]])
    with pytest.raises(ValueError, match="each of the 2 columns, got 1"):
        format_table(["a", "b"], [[1, 2]], align=["left"])
