"""Chat templates: the text of a conversation, as the Hugging Face Hub stores them."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.errors import require_extra

Message = Mapping[str, str]  # `role` and `content`


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, which sees `messages`, `add_generation_prompt`, `bos_token` and `eos_token`.

    >>> text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    >>> template = ChatTemplate(text, eos_token="|")
    >>> template.render([dict(role="user", content="hello")], add_prompt=False)
    '<user>hello|'

    Attributes:
      text: the template. It cannot run code.
      bos_token, eos_token: texts of the tokens that begin and end a document.
    """

    text: str
    bos_token: str = ""
    eos_token: str = ""

    def render(self, messages: Sequence[Message], add_prompt: bool) -> str:
        """Return the text of messages, with the beginning of an answer if `add_prompt`."""
        tokens = dict(bos_token=self.bos_token, eos_token=self.eos_token)
        text: str = _compile(self.text).render(messages=list(messages), add_generation_prompt=add_prompt, **tokens)
        return text

    def split(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """Return the parts of a conversation in order: texts, and whether the assistant wrote them.

        A conversation that another role ends continues with the beginning of an answer.

        Raises:
          ValueError: the template changes earlier messages when another one is added.
        """
        parts: list[tuple[str, bool]] = []
        done = ""
        is_answered = messages[-1]["role"] == "assistant"
        ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for end in ends if is_answered else [*ends, len(messages)]:
            # Rendered up to each answer: only the template knows where the answer of a role begins and ends in the
            # text.
            texts = [self.render(messages[:end], True)]
            if end < len(messages):
                texts.append(self.render(messages[: end + 1], False))
            for text, is_learned in zip(texts, (False, True), strict=False):
                # Some templates drop earlier messages (such as reasoning); a split by prefixes would assign wrong
                # parts, in silence.
                if not text.startswith(done):
                    raise ValueError("a chat template must leave earlier messages as they are when another is added")
                parts.append((text[len(done) :], is_learned))
                done = text
        return parts


@functools.cache
def _compile(text: str) -> Any:
    with require_extra("text", "chat templates require jinja2"):
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise ValueError(f"the chat template refuses the messages: {message}")

    # As in transformers, for which these templates are written. They may be from anyone: hence the sandbox.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(text)
