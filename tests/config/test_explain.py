"""Test that explainers add notes to an error, and can neither replace nor hide it."""

import pytest

from jengine.config import explain, plugins

EXPLAINERS = {
    "fails": lambda error, context: context["no such entry"],
    "interrupts": lambda error, context: (_ for _ in ()).throw(KeyboardInterrupt),
    "says one thing": lambda error, context: f"while it was {context['activity']}",
    "says several": lambda error, context: ["one", "two"],
    "says nothing": lambda error, context: None,
    "says what is no text": lambda error, context: 3,
}


@pytest.fixture
def explainers(tmp_path, monkeypatch):
    """Provide the explainers in an extra of another package."""
    (tmp_path / "my_plugin.py").write_text(
        f"provides = {{'explainers': dict.fromkeys({list(EXPLAINERS)}, 'my_explainers') | {{'is missing': 'my_explainers'}}}}"
    )
    package = tmp_path / "my_explainers-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: my-explainers\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[jengine.extras]\nmine = my_plugin\n")
    (tmp_path / "my_explainers.py").write_text(
        "from tests.config.test_explain import EXPLAINERS\nglobals().update(EXPLAINERS)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    caches = plugins.list_extras, plugins.provided, plugins._find_extras
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_explainers_add_notes_and_cannot_replace_the_error(explainers):
    assert "says one thing" in plugins.provided("explainers")
    error = ValueError("the user's")
    with (
        pytest.raises(ValueError, match="the user's") as caught,
        explain.explained(activity="training"),
    ):
        raise error
    assert caught.value is error
    assert caught.value.__context__ is None
    assert error.__notes__ == ["while it was training", "one", "two"]
