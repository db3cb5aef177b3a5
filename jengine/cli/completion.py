"""Print the script with which a shell completes the commands, options and files of `jengine`."""

import argparse
from typing import Any

_SHELLS = ("bash", "zsh", "fish")
_EPILOG = """To complete `jengine` in new shells:
  bash:  jengine completion bash > ~/.local/share/bash-completion/completions/jengine
  zsh:   jengine completion zsh > ~/.zfunc/_jengine, with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
  fish:  jengine completion fish > ~/.config/fish/completions/jengine.fish
"""
# How an argument is completed, by its name in the help text.
_FILES = ("CONFIG", "CHECKPOINT", "DUMP", "FILE", "PATH")
_DIRECTORIES = ("DIR", "WORK_DIR")


def add_parser(commands: Any, common: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the command `completion`, and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "completion", parents=[common], help="print a shell's completion script", epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("shell", choices=_SHELLS, help="the shell")
    return parser


def print_script(shell: str, parser: argparse.ArgumentParser) -> None:
    """Print the script of a shell for all commands of `parser`."""
    import shtab

    _complete_paths(parser, shtab)
    print(shtab.complete(parser, shell=shell), end="")


def _complete_paths(parser: argparse.ArgumentParser, shtab: Any) -> None:
    """Mark the arguments that are paths, of a parser and those of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command, shtab)
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _DIRECTORIES:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
