"""Record what Hugging Face transformers renders for the chat templates in this directory.

Run this script in its directory, with packages that the tests do not need:
`pip install transformers==5.24.0 tokenizers jinja2`, then `python record.py`.

The templates are small ones, written for these tests in the idioms of public models. `rendered.json` has for each
template and conversation the text with and without the beginning of an answer, or None where the template refuses the
messages, and the spans of `{% generation %}`.
"""

import json
import pathlib

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

TOKENS = dict(
    bos_token="<s>", eos_token="</s>", unk_token="<unk>", sep_token="[SEP]", pad_token="<pad>", cls_token="[CLS]"
)
SYSTEM = dict(role="system", content="Be brief & <kind>.")
TALK = [
    dict(role="user", content="Is 1 < 2 & 'é' > \"x\"? unknown"),
    dict(role="assistant", content="Yes: 1 < 2."),
    dict(role="user", content="  Sure? "),
    dict(role="assistant", content="<b>Sure</b> \n"),
]
CALL = dict(name="add", arguments=dict(a=1, b="<2>&'é'"))
TOOL = dict(type="function", function=dict(name="add", description="Adds <a> & b", parameters={}))
CONVERSATIONS = dict(
    talk=dict(messages=TALK),
    system=dict(messages=[SYSTEM, *TALK[:2]]),
    asked=dict(messages=TALK[:3]),
    nulls=dict(messages=[dict(TALK[0], name=None, tool_calls=None), dict(TALK[1], tool_calls=None)]),
    reasoning=dict(messages=[TALK[0], dict(TALK[1], reasoning="1 is less"), TALK[2], dict(TALK[3], thinking="I am")]),
    tags=dict(messages=[TALK[0], dict(TALK[1], content="<think>\nhm\n</think>\n\nYes.")]),
    tools=dict(
        messages=[
            TALK[0],
            dict(role="assistant", content="", tool_calls=[dict(type="function", function=CALL)]),
            dict(role="tool", content="3"),
            TALK[3],
        ],
        tools=[TOOL],
    ),
    documents=dict(messages=TALK[:2], documents=[dict(title="A & B", text="a <text>"), dict(title="C", text="d")]),
)


def main() -> None:
    model = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS.values())}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, **TOKENS)
    rendered = {}
    for file in sorted(pathlib.Path().glob("*.jinja")):
        template = file.read_text()
        rendered[file.stem] = {}
        for name, conversation in CONVERSATIONS.items():
            found = {}
            for key, add in (("text", False), ("prompt", True)):
                arguments = dict(chat_template=template, tokenize=False, add_generation_prompt=add)
                messages, others = conversation["messages"], {k: v for k, v in conversation.items() if k != "messages"}
                try:
                    found[key] = tokenizer.apply_chat_template(messages, **arguments, **others)
                except TemplateError:
                    found[key] = None
            if "{% generation %}" in template:
                _, spans = render_jinja_template(
                    [messages], chat_template=template, return_assistant_tokens_mask=True, **others, **TOKENS
                )
                found["spans"] = spans[0]
            rendered[file.stem][name] = found
    content = dict(tokens=TOKENS, conversations=CONVERSATIONS, rendered=rendered)
    pathlib.Path("rendered.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
