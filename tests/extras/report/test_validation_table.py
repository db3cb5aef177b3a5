import pytest

from jengine.extras.report.validations import format_validations


def cells(table):
    """Return the heading and the rows of a table as lists of texts."""
    title, *lines = table.splitlines()
    assert title == "Validations"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def make_validations(values, name="accuracy"):
    return [(i + 1, 10 * (i + 1), {name: value}) for i, value in enumerate(values)]


def test_the_best_row_is_marked_with_the_metric():
    table = cells(format_validations(make_validations([0.5, 0.75, 0.625]), by_epoch=True))
    assert table == [
        ["epoch", "iter", "accuracy", "best"],
        ["1", "10", "0.5000", ""],
        ["2", "20", "0.7500", "accuracy"],
        ["3", "30", "0.6250", ""],
    ]


def test_runs_over_iterations_show_iterations_only():
    table = cells(format_validations(make_validations([2.0, 1.0], "loss"), by_epoch=False))
    assert table == [["iter", "loss", "best"], ["10", "2.0000", ""], ["20", "1.0000", "loss"]]


def test_monitored_metrics_and_their_rules_come_before_names():
    validations = [(1, 1, {"accuracy": 0.5, "a": 3.0, "b": 1.0}), (2, 2, {"accuracy": 0.9, "a": 2.0, "b": 5.0})]
    monitored = [("a", "greater"), ("b", "greater"), ("other", "less")]
    table = cells(format_validations(validations, by_epoch=True, monitored=monitored))
    assert [row[-1] for row in table[1:]] == ["a", "b"]


def test_of_equal_values_the_first_is_the_best_and_nan_never_is():
    table = cells(format_validations(make_validations([float("nan"), 1.0, 1.0, 2.0], "loss"), by_epoch=True))
    assert [row[-1] for row in table[1:]] == ["", "loss", "", ""]


def test_without_a_metric_to_compare_no_row_is_marked():
    assert cells(format_validations(make_validations([1.0], "score"), by_epoch=False)) == [
        ["iter", "score"],
        ["10", "1.0000"],
    ]


@pytest.mark.parametrize(("count", "rows"), [(20, 20), (21, 21), (22, 21), (30, 21)])
def test_a_table_of_more_than_twenty_one_rows_is_cut_in_the_middle(count, rows):
    table = cells(format_validations(make_validations([float(i) for i in range(count)]), by_epoch=False))[1:]
    assert len(table) == rows
    iterations = [row[0] for row in table]
    assert iterations[:10] == [str(10 * i) for i in range(1, 11)]
    assert iterations[-10:] == [str(10 * i) for i in range(count - 9, count + 1)]
    assert [text for text in iterations if "more" in text] == ([f"… {count - 20} more …"] if count > 21 else [])


def test_the_best_row_of_the_middle_is_shown():
    values = [0.0] * 40
    values[14] = 1.0
    iterations = [row[0] for row in cells(format_validations(make_validations(values), by_epoch=False))[1:]]
    assert iterations[9:14] == ["100", "… 4 more …", "150", "… 15 more …", "310"]
