import pytest

from jengine.config.errors import ConfigError
from jengine.extras.sweeps.space import list_settings, parse_grid, parse_ranges
from jengine.extras.sweeps.sweep_check import complete_path
from tests.refusals import check_refusal


def test_more_draws_begin_with_the_same_ones_and_stay_in_their_ranges():
    ranges = parse_ranges(["lr=1e-4..1e-1:log", "depth=2..4:int"])
    few, many = (list_settings(None, {"act": ["relu", "gelu"]}, ranges, draws, []) for draws in (5, 40))
    assert many[:5] == few
    assert all(1e-4 <= setting["lr"] <= 1e-1 for setting in many)
    assert {setting["depth"] for setting in many} == {2, 3, 4}
    assert {setting["act"] for setting in many} == {"relu", "gelu"}
    assert 15 <= sum(setting["lr"] < 3.16e-3 for setting in many) <= 25  # half of the magnitudes


def test_settings_of_the_config_are_combined_with_a_grid_and_seeds():
    settings = list_settings([{"a": 1}, {"a": 2, "b": 3}], {"lr": [0.1, 0.2]}, {}, 0, [0, 5])
    assert len(settings) == 8
    assert settings[3] == {"a": 2, "b": 3, "lr": 0.2, "randomness.seed": 0}
    assert {setting["randomness.seed"] for setting in settings[4:]} == {5}


def test_values_of_a_grid_are_literals_or_words():
    grid = parse_grid(["--config.a=1e-3,true,None,Adam", "b=[1,2],{'x': 'a,b'}"])
    assert grid == {"a": [1e-3, True, None, "Adam"], "b": [[1, 2], {"x": "a,b"}]}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["lr=1e-3,,1e-2"], ["got lr=1e-3,,1e-2"]),
        (["lr=1e-3", "lr=1e-2"], ["got lr=1e-3 and lr=1e-2"]),
        (["lr"], ["PATH=VALUES", "got 'lr'"]),
        (["lr=1e-3..1e-1:log"], ["--random", "--range", "lr=1e-3..1e-1"]),
    ],
)
def test_a_grid_of_another_form_is_refused(texts, words):
    check_refusal(lambda: parse_grid(texts), ConfigError, *words)


@pytest.mark.parametrize("text", ["lr", "lr=1", "lr=1..x", "lr=2..1", "lr=0..1:log", "lr=1..2:linear", "lr=0.2..3:int"])
def test_a_range_of_another_form_is_refused(text):
    with pytest.raises(ConfigError, match="--range|the range of `lr`"):
        parse_ranges([text])


def test_a_short_name_must_mean_one_path():
    paths = ["optim_wrapper.optimizer.lr", "model.head.width", "model.neck.width"]
    assert complete_path("head.width", paths) == "model.head.width"
    assert complete_path("model.new", paths) == "model.new"  # the Runner knows whether there is such a key
    assert complete_path("optimizer", paths) == "optim_wrapper.optimizer"  # a whole dict
    assert complete_path("augments", ["custom_hooks[0].augments[0].prob"]) == "custom_hooks[0].augments"
    assert complete_path("randomness.seed", paths) == "randomness.seed"
    with pytest.raises(ConfigError, match=r"got several: model\.head\.width, model\.neck\.width"):
        complete_path("width", paths)
    with pytest.raises(ConfigError, match="did you mean 'lr'"):
        complete_path("lrr", paths)
