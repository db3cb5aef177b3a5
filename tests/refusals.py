"""Check a row of a table of what is refused: a call, its error, and the words that must be in the message.

The words are what a reader needs: the path, the value, the legal values, the way out. The sentence around them may change.
"""

import functools
import inspect

import pytest


def check_refusal(call, error, *words):
    """Check that a call is refused with an error whose message or notes have the words."""
    with pytest.raises(error) as refusal:
        call()
    # `str` of a KeyError escapes quotes, its argument does not
    text = "\n".join([str(refusal.value), *map(str, refusal.value.args), *getattr(refusal.value, "__notes__", ())])
    assert [word for word in words if word not in text] == [], text


def check_row(request, call, error, *words):
    """Check a row whose call takes fixtures, by the names of its arguments without a default."""
    parameters = inspect.signature(call).parameters.values()
    arguments = {p.name: request.getfixturevalue(p.name) for p in parameters if p.default is p.empty}
    check_refusal(functools.partial(call, **arguments), error, *words)
