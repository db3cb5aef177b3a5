"""Test plain-text tables: cells, alignment, errors."""


from jengine.logging import format_table, shorten_rows


def test_table_is_plain_text_of_any_width():
    rows = [["[a]", 1234567, 0.1, None], ["b", 1, 1e-5, "x" * 200]]
    lines = format_table(["group", "parameters", "lr", "note"], rows, title="Groups").splitlines()
    assert lines[0] == "Groups"
    assert lines[2].startswith("| group | parameters |    lr | note ")
    assert lines[4].startswith("| [a]   |  1,234,567 |   0.1 |      ")
    assert lines[5] == f"| b     |          1 | 1e-05 | {'x' * 200} |"


def test_a_cell_cannot_add_lines():
    assert format_table(["name"], [["a\n+---+\x1b[2J"]]).splitlines()[3] == r"| a\n+---+\x1b[2J |"


def test_columns_can_be_aligned():
    lines = format_table(["a", "b"], [["x", 1], ["long", 22]], align=["right", "left"]).splitlines()
    assert lines[3:5] == ["|    x | 1  |", "| long | 22 |"]


def test_characters_of_two_columns_have_their_width():
    lines = format_table(["名", "n"], [["数据集", 1], ["é", 22]], align=["center", "right"]).splitlines()
    assert lines[:2] == ["+--------+----+", "|   名   |  n |"]
    assert lines[3:] == ["| 数据集 |  1 |", "|   é    | 22 |", "+--------+----+"]


def test_long_tables_are_cut_in_the_middle():
    rows = [[str(i), "x"] for i in range(9)]
    assert shorten_rows(rows, 9) == rows
    assert shorten_rows(rows, 5) == [["0", "x"], ["1", "x"], ["… 5 more …", ""], ["7", "x"], ["8", "x"]]
