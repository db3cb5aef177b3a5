"""Test chat templates beside transformers (see tests/data/chat/record.py), which parts are learned, and their limits."""

import json
import pathlib

import pytest

from jengine.extras.language import ChatTemplate
from tests.refusals import check_refusal

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


def find_learned(name, conversation):
    variables = dict(RECORDED["conversations"][conversation])
    return [
        text for text, is_learned in read_template(name).split(variables.pop("messages"), **variables) if is_learned
    ]


@pytest.mark.parametrize(
    ("name", "conversation", "learned"),
    [
        ("chatml", "talk", ["Yes: 1 < 2.<|im_end|>\n", "<b>Sure</b> \n<|im_end|>\n"]),
        ("llama2", "talk", [" Yes: 1 < 2. </s>", " <b>Sure</b> </s>"]),
        # the last answer has an empty thought, which the model writes itself; the earlier one has none any more
        ("qwen3", "talk", ["Yes: 1 < 2.<|im_end|>\n", "<think>\n\n</think>\n\n<b>Sure</b> \n<|im_end|>\n"]),
        ("qwen3", "reasoning", ["Yes: 1 < 2.<|im_end|>\n", "<think>\nI am\n</think>\n\n<b>Sure</b> \n<|im_end|>\n"]),
        # the request for an answer opens <think>, which the template drops from answers
        ("deepseek_r1", "talk", ["Yes: 1 < 2.</s>", "<b>Sure</b> \n</s>"]),
        ("deepseek_r1", "tags", ["\n\nYes.</s>"]),
        # the last answer closes in another way than earlier ones
        ("phi3", "talk", ["Yes: 1 < 2.<|end|>\n", "<b>Sure</b> \n<|end|>\n</s>"]),
        (
            "harmony",
            "talk",
            ["<|channel|>final<|message|>Yes: 1 < 2.<|end|>", "<|channel|>final<|message|><b>Sure</b> \n<|return|>"],
        ),
        ("qwen25", "system", ["Yes: 1 < 2.<|im_end|>\n"]),
        ("chatml", "asked", ["Yes: 1 < 2.<|im_end|>\n"]),
    ],
)
def test_of_a_conversation_the_answers_with_their_ends_are_learned(name, conversation, learned):
    assert find_learned(name, conversation) == learned


def test_a_tag_that_the_request_opens_is_not_learned_if_the_answer_continues_it():
    text = (
        "{% for m in messages %}{{ '<' + m.role + '>' }}{{ '<think>' if m.role == 'assistant' }}{{ m.content }}|"
        "{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"
    )
    messages = [dict(role="user", content="a"), dict(role="assistant", content="b</think>c")]
    assert ChatTemplate(text).split(messages) == [("<user>a|<assistant><think>", False), ("b</think>c|", True)]
    opened = text.replace("{{ '<think>' if m.role == 'assistant' }}", "")
    messages[1]["content"] = "<b>"  # begins as the tag does
    assert ChatTemplate(opened).split(messages) == [("<user>a|<assistant>", False), ("<b>|", True)]
    messages = [dict(messages[1]), *messages]  # nothing before it
    assert [x for x, is_learned in ChatTemplate(opened).split(messages) if is_learned] == ["<b>|", "<b>|"]


@pytest.mark.parametrize("character", ["\ufdd0", "\ufdd1", "\uffff", "\x00"])
def test_no_character_of_a_message_changes_which_part_is_learned(character):
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    question, answer = f"{character}a{character}", f"b{character}"
    messages = [dict(role="user", content=question), dict(role="assistant", content=answer)]
    assert template.split(messages) == [(question, False), (answer, True)]


def test_switches_and_other_special_tokens_are_given_by_name():
    template = read_template("qwen3")
    thoughtless = ChatTemplate(template.text, variables=dict(enable_thinking=False))
    question = [dict(role="user", content="a")]
    assert thoughtless.render(question, True) == template.render(question, True) + "<think>\n\n</think>\n\n"
    assert template.render(question, True, enable_thinking=False) == thoughtless.render(question, True)
    assert ChatTemplate("{{ messages[0].content }}{{ bos_token is defined }}").render(question, False) == "aFalse"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", ["within 2 seconds"]),
        ("{{ 9**(9**9) }}", ["within 2 seconds"]),  # a single operation
        ("{{ 'x' * 10**12 }}", ["less memory"]),
        ("{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", ["16777216"]),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ["call itself"]),
        ("{{ raise_exception('no roles') }}", ["no roles"]),
        ("{% for %}", ["got TemplateSyntaxError"]),
        ("{{ ''.__class__.__mro__ }}", ["got SecurityError"]),
    ],
)
def test_a_template_that_never_ends_or_fails_is_one_error(text, words):
    question = [dict(role="user", content="a")]
    check_refusal(lambda: ChatTemplate(text).render(question, False), ValueError, *words)
    assert ChatTemplate("{{ messages[0].content }}").render(question, False) == "a"  # the next one is not concerned


@pytest.mark.parametrize(
    ("messages", "error", "words"),
    [
        ([], ValueError, ["`messages`", "`role`", "got []"]),
        ([dict(content="a")], ValueError, ["`messages`", "`role`"]),
        ([dict(role="user", content="a"), dict(role="assistant", content="b")], ValueError, ["write each answer"]),
        ([dict(role="user", content=object())], TypeError, ["object"]),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(messages, error, words):
    check_refusal(lambda: ChatTemplate("{{ messages[0].content }}").split(messages), error, *words)
