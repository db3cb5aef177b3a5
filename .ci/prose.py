"""Check the language of the project: openings of docstrings, words that are not used, and one template for errors.

Run as `python .ci/prose.py PATH...`; a path is a file or a directory, of Python or Markdown. Ruff's D401 checks the
docstrings of functions; this checks those of modules and classes too, except in tests, whose names describe them.
"""

import ast
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

# Patterns and their rewrites. Programs do not speak: a function returns, logs, passes, requires.
WORDS = {
    r"says|tells|told|asks|asked": "returns, logs, reports, passes, requires",
    r"knows|wants": "has, requires, expects",
    r"(?<![Tt]here )(?:is|are) no(?! longer)": "is not a, must not be",
    r"anew": "again, from scratch",
    r"beside": "next to, in addition to",
    r"whoever": "the caller, the user, any process that",
    r"in the making": "pending",
    r"goes on|go on|going on": "continues",
    r"lies|lie|lying": "is, is stored",
    r"thereof|whereof|therein": "of it, in it",
    r"in the place of": "instead of",
    r"seldom": "rarely",
    r"at odds": "inconsistent",
    r"without a word": "silently",
    r"made up for": "caught up, runs first",
    r"for ever": "forever",
    r"likewise": "also, in the same way",
}
_WORDS = {re.compile(rf"\b(?:{pattern})\b"): rewrite for pattern, rewrite in WORDS.items()}
# What a summary that names a thing, or a third person, opens with. "Access" and its like are imperatives.
_NO_VERBS = re.compile(
    r"(A|An|The|This|That|These|Those|What|Whether|Which|Where|When|Who|Why|How|If|For|From|In|On|Of|As|At|By|With|To|"
    r"One|Two|Three|Some|Several|Each|Every|All|Any|No|[A-Z][a-z]*[^s\W]s)\b|[^A-Z]"
)
Finding = tuple[int, str]


def check_python(source: str, docstrings: bool = True) -> Iterator[Finding]:
    """Yield the findings in a Python file, with or without those in openings of docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield from _check_docstring(node) if docstrings else ()
        elif isinstance(node, ast.Raise):
            yield from _check_error(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _check_text(node.value, node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _check_text(token.string, token.start[0])


def check_markdown(text: str) -> Iterator[Finding]:
    """Yield the findings in a Markdown file, code blocks included: their comments are read as well."""
    yield from _check_text(text, 1)


def _check_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[Finding]:
    docstring = ast.get_docstring(node)
    decorators = map(ast.unparse, getattr(node, "decorator_list", ()))
    if docstring and not any("property" in name for name in decorators) and _NO_VERBS.match(docstring):
        line = getattr(node, "lineno", 1)
        yield line, f"open the docstring with an imperative verb: {docstring.splitlines()[0]!r}"


def _check_error(node: ast.Raise) -> Iterator[Finding]:
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    for text in texts:
        if re.search(r"\bfound $|[,;:] found\b", text):
            yield node.lineno, f"write errors as '`x` must be X, got Y; did you mean Z?': {text!r}"
    if isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) == "AssertionError":
        yield node.lineno, "raise errors.ArgumentError, which is an AssertionError and a ValueError"


def _check_text(text: str, first: int) -> Iterator[Finding]:
    for pattern, rewrite in _WORDS.items():
        for match in pattern.finditer(text):
            line = first + text.count("\n", 0, match.start())
            yield line, f"{match.group()!r}: write {rewrite}"


def main(arguments: list[str]) -> int:
    """Print the findings in the files; return 1 if there are any."""
    count = 0
    for argument in map(pathlib.Path, arguments):
        paths = [argument] if argument.is_file() else sorted(p for e in ("py", "md") for p in argument.rglob(f"*.{e}"))
        for path in paths:
            text = path.read_text()
            found = check_python(text, "tests" not in path.parts) if path.suffix == ".py" else check_markdown(text)
            for line, message in sorted(set(found)):
                print(f"{path}:{line}: {message}")
                count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
