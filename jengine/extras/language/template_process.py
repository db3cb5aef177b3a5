"""Render chat templates in a process of its own, which `jengine.extras.language.chat` starts.

Templates come from strangers, together with weights. Jinja's sandbox keeps them from running code,
but no check within a process stops `9**9**9` or a text that doubles forty times. Here the operating
system does.

Each line of the standard input is a request in JSON, each line of the standard output its answer: a
list of texts with the spans of `{% generation %}`, or a string that says what is wrong. The
arguments are the limits for a request: seconds of CPU time, bytes, and characters of a text.
"""

import contextlib
import datetime
import functools
import json
import resource
import secrets
import signal
import sys
from collections.abc import Mapping
from typing import Any

from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Drawn, so that no text has them: messages come from strangers too.
_BEGIN, _END = (f"\ufdd0{secrets.token_hex(8)}\ufdd1" for _ in range(2))


class _Generation(Extension):
    """The tag `{% generation %}`, which is around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 - an attribute of Jinja's class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class _RefusalError(Exception):
    """What the template says about messages that it refuses."""


def _raise_exception(message: str) -> None:
    raise _RefusalError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache
def _compile(text: str) -> Template:
    # As in transformers, for which these templates are written.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda style: datetime.datetime.now().strftime(style)
    return environment.from_string(text)


def _answer(request: Mapping[str, Any], most: int) -> list[tuple[str, list[tuple[int, int]]]] | str:
    try:
        template = _compile(request["template"])
        messages = request["messages"]
        texts = []
        for count, add_prompt in request["prefixes"]:
            parts = []
            size = 0
            variables = {
                **request["variables"],
                "messages": messages[:count],
                "add_generation_prompt": add_prompt,
            }
            for part in template.generate(variables) if count else ():
                parts.append(part)
                size += len(part)
                if size > most:
                    return (
                        f"the chat template must write at most {most} characters for a conversation"
                    )
            texts.append(_find_spans("".join(parts)))
        return texts
    except _RefusalError as error:
        return f"the chat template refuses the messages: {error}"
    except MemoryError:
        return "the chat template must need less memory: its text may grow without an end"
    except RecursionError:
        return "the chat template must not call itself without an end"
    except Exception as error:  # a template can make any operation fail
        kind = type(error).__name__
        return f"the chat template must be valid for these messages, got {kind}: {error}"


def _find_spans(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without the marks, and the places of what they enclose."""
    text = ""
    spans = []
    for part in marked.split(_BEGIN):
        inside, _, after = part.rpartition(_END)
        if inside:
            spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, spans


def _main() -> None:
    seconds = float(sys.argv[1])
    memory = int(sys.argv[2])
    most = int(sys.argv[3])
    # The process ends with its parent, by the end of the input: not before it, when a run saves
    # after a signal.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):  # some systems do not limit memory
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin:
        # Without a handler the signal ends the process, even in the middle of one long operation.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = json.dumps(_answer(json.loads(line), most))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    _main()
