"""Test chat templates beside transformers (see tests/data/chat/record.py), which parts are learned, and their limits."""

import json
import pathlib

import pytest

from jengine.contrib.language import ChatTemplate

DATA = pathlib.Path(__file__).parents[2] / "data" / "chat"
RECORDED = json.loads((DATA / "rendered.json").read_text())


def read_template(name):
    return ChatTemplate.from_tokens((DATA / f"{name}.jinja").read_text(), RECORDED["tokens"])


@pytest.mark.parametrize("conversation", RECORDED["conversations"])
@pytest.mark.parametrize("name", RECORDED["rendered"])
def test_a_template_renders_as_in_transformers(name, conversation):
    template = read_template(name)
    recorded = RECORDED["rendered"][name][conversation]
    variables = dict(RECORDED["conversations"][conversation])
    messages = variables.pop("messages")
    for key, add_prompt in (("text", False), ("prompt", True)):
        if recorded[key] is None:
            with pytest.raises(ValueError, match=r"the chat template (refuses|must be valid)"):
                template.render(messages, add_prompt, **variables)
        else:
            assert template.render(messages, add_prompt, **variables) == recorded[key]
    if recorded["text"] is not None:
        parts = template.split(messages, **variables)
        asks = messages[-1]["role"] != "assistant"
        assert "".join(text for text, _ in parts) == recorded["prompt" if asks else "text"]
        if "spans" in recorded:
            learned = [recorded["text"][start:end] for start, end in recorded["spans"]]
            assert [text for text, is_learned in parts if is_learned] == learned
