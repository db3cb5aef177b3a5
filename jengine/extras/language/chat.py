"""Chat templates: the text of a conversation, as the Hugging Face Hub stores them."""

import atexit
import dataclasses
import functools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jengine.config.errors import require_extra
from jengine.config.json_codec import decode, encode

Message = Mapping[str, Any]  # `role` and `content`, and what else the template reads
Span = tuple[int, int]  # the first character and the one after the last

_SECONDS = 2.0  # of CPU time for a conversation, which takes less than a millisecond
_MEMORY = 2**30
_CHARACTERS = 2**24
_TAG = re.compile(r"\s*(<[^<>]*>|\[[^\[\]]*\])\s*")
# names of the same entry in public data sets
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, which sees `messages`, `add_generation_prompt`, `bos_token` and
    `eos_token`.

    It renders as in `transformers`. It cannot run code, and ends with an error after two seconds,
    with more than 1 GiB, or with more than 16 million characters for a conversation.

    >>> text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    >>> template = ChatTemplate(text, eos_token="|")
    >>> template.render([dict(role="user", content="hello")], add_prompt=False)
    '<user>hello|'

    Attributes:
      text: the template.
      bos_token, eos_token: texts of the tokens that begin and end a document; empty ones are not
        defined.
      variables: what else the template reads: other special tokens, such as `unk_token`, and its
        own switches, such as `enable_thinking`.
    """

    text: str
    bos_token: str = ""
    eos_token: str = ""
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_tokens(cls, text: str, tokens: Mapping[str, str]) -> "ChatTemplate":
        """Return the template with special tokens by name, such as `eos_token`."""
        others = {
            name: token for name, token in tokens.items() if name not in ("bos_token", "eos_token")
        }
        return cls(text, tokens.get("bos_token", ""), tokens.get("eos_token", ""), others)

    def render(self, messages: Sequence[Message], add_prompt: bool, **variables: Any) -> str:
        """Return the text of messages.

        Args:
          messages: dicts of `role`, `content` and what else the template reads, as in JSON.
          add_prompt: whether the beginning of an answer follows.
          **variables: further variables, such as `tools`, which take precedence over those of the
            template.

        Raises:
          ValueError: the template refuses the messages, is invalid, or exceeds a limit. TypeError:
            not as in JSON.
        """
        return self._render(messages, [(len(messages), add_prompt)], variables)[0][0]

    def split(self, messages: Sequence[Message], **variables: Any) -> list[tuple[str, bool]]:
        """Return the parts of a conversation in order: texts, and whether the assistant wrote them.

        Together they are the text of the conversation, in which another role's last message is
        followed by the beginning of an answer. The assistant writes what is within `{% generation
        %}`; without that tag, what follows the text that asks for the answer, up to the next
        message.

        Raises:
          ValueError: the template leaves an answer out, or what `render` raises.
        """
        asks = not messages or messages[-1].get("role") != "assistant"
        ((text, spans),) = self._render(messages, [(len(messages), asks)], variables)
        if not spans:
            spans = self._find_answers(messages, asks, text, variables)
        parts = []
        done = 0
        for start, end in spans:
            parts += [(text[done:start], False), (text[start:end], True)]
            done = end
        return [(part, is_learned) for part, is_learned in [*parts, (text[done:], False)] if part]

    def _find_answers(
        self, messages: Sequence[Message], asks: bool, text: str, variables: Mapping[str, Any]
    ) -> list[Span]:
        """Return where the answers with their ends are in the text of the conversation."""
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        prefixes = [prefix for i in places for prefix in ((i, True), (i + 1, False), (i + 1, True))]
        texts = (
            [prefix for prefix, _ in self._render(messages, prefixes, variables)] if places else []
        )
        spans = []
        for place, before, through, asking in zip(
            places, texts[::3], texts[1::3], texts[2::3], strict=True
        ):
            has_before = bool(before) and text.startswith(before)
            has_through = text.startswith(through)
            start = len(before)
            end = len(through)
            # Otherwise the request for an answer opens a tag (such as <think>) that this answer
            # does not have, or the template changes earlier answers when messages follow.
            if not (has_before and has_through):
                content_start, content_end = self._find_content(
                    messages, place, asks, text, variables
                )
                start = start if has_before else content_start
            if not has_through:
                answer = messages[: place + 1]
                closing = through[self._find_content(answer, place, False, through, variables)[1] :]
                followed = asking[self._find_content(answer, place, True, asking, variables)[1] :]
                end = content_end + len(_find_closing(text[content_end:], closing, followed))
            if end <= start and messages[place].get("content"):
                raise ValueError(
                    "the chat template must write each answer, got none for "
                    f"{messages[place]!r:.80}"
                )
            spans.append((start, max(start, end)))
        return spans

    def _find_content(
        self,
        messages: Sequence[Message],
        place: int,
        asks: bool,
        text: str,
        variables: Mapping[str, Any],
    ) -> Span:
        """Return where the text differs if the message at a place has another content."""
        others = []
        # one of them differs from the first letter of the answer, and from the last
        for letter in "xy":
            other = {"role": "assistant", "content": letter}
            others.append(
                self.render([*messages[:place], other, *messages[place + 1 :]], asks, **variables)
            )
        start = min(_count_equal(text, other) for other in others)
        end = len(text) - min(_count_equal(text[::-1], other[::-1]) for other in others)
        return start, max(start, end)  # an empty content has letters before and after it in common

    def _render(
        self,
        messages: Sequence[Message],
        prefixes: Sequence[tuple[int, bool]],
        variables: Mapping[str, Any],
    ) -> list[tuple[str, list[Span]]]:
        """Return the text of the first messages, and where it has `{% generation %}`.

        Args:
          messages: the conversation.
          prefixes: for each text the number of messages, and whether the beginning of an answer
            follows. No messages have no text.
          variables: further variables.
        """
        if not messages or any("role" not in message for message in messages):
            raise ValueError(
                f"`messages` must be one or more dicts with a `role`, got {messages!r:.80}"
            )
        tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        defined = {name: token for name, token in tokens.items() if token}
        request = {
            "template": self.text,
            "variables": {
                "tools": None,
                "documents": None,
                **defined,
                **self.variables,
                **variables,
            },
            "messages": [_normalize(message) for message in messages],
            "prefixes": prefixes,
        }
        answers = _get_process(os.getpid()).ask(encode(request))
        return [(text, [(start, end) for start, end in spans]) for text, spans in answers]


def _count_equal(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    different = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(different, min(len(first), len(second)))


def _find_closing(rest: str, closing: str, followed: str) -> str:
    """Return how the text after an answer closes it.

    Args:
      rest: the text after the answer.
      closing: the text after the same answer as the last one.
      followed: that with the beginning of another answer.
    """
    for text in (closing, closing.rstrip()):
        if rest.startswith(text):
            return text
    # Some templates close the last answer in another way, and others only.
    found = _TAG.match(rest[: _count_equal(rest, followed)])
    return found[0] if found else ""


def _normalize(message: Message) -> dict[str, Any]:
    """Return a message as transformers gives it to templates: without None, and with each name
    of its reasoning.
    """
    entries = {name: value for name, value in message.items() if value is not None}
    reasoning = next((entries[name] for name in _REASONING if name in entries), None)
    if reasoning is None:
        return entries
    return {"thinking": reasoning, **entries, "reasoning_content": reasoning}


class _TemplateProcess:
    """Process that renders templates, started at the first one and again after one that exceeds
    a limit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self._close)

    def ask(self, request: str) -> Any:
        """Return the answer to a request; ValueError if it is an error or there is none."""
        with self._lock:
            try:
                line = self._send(request)
            except BaseException:
                # an interrupt: the next request must not get the answer to this one
                self._close()
                raise
            code = self._close() if not line else None
        if code == -signal.SIGPROF:
            raise ValueError(
                f"the chat template must end within {_SECONDS:g} seconds for a conversation"
            )
        if code is not None:
            raise ValueError(
                f"the chat template ended the process that renders it with the exit code {code}"
            )
        answer = decode(line)
        if isinstance(answer, str):
            raise ValueError(answer)
        return answer

    def _send(self, request: str) -> str:
        if self._process is None:
            self._process = _start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return ""
        return process.stdout.readline()

    def _close(self) -> int:
        """End the process and return its exit code."""
        process = self._process
        self._process = None
        if process is None:
            return 0
        with process:  # closes the pipes, and with its input the process ends
            pass
        return process.returncode


@functools.cache
# of this process: a forked one cannot share the pipes
def _get_process(pid: int) -> _TemplateProcess:
    return _TemplateProcess()


def _start() -> subprocess.Popen[str]:
    with require_extra("text", "chat templates require jinja2"):
        import jinja2  # noqa: F401
    # By its file and without this package: a process that imports JAX takes seconds to start.
    file = Path(__file__).with_name("template_process.py")
    limits = [str(_SECONDS), str(_MEMORY), str(_CHARACTERS)]
    return subprocess.Popen(
        [sys.executable, "-P", str(file), *limits],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONIOENCODING": "utf-8",
        },
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
