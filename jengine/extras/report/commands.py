"""The commands `jengine diff`, `report`, `table`, `ckpt` and `completion`."""

import argparse

from jengine.cli.parser import CHECKPOINT, Commands

_COMPLETION_EPILOG = """To complete `jengine` in new shells:
  bash:  jengine completion bash > ~/.local/share/bash-completion/completions/jengine
  zsh:   jengine completion zsh > ~/.zfunc/_jengine, with `fpath+=~/.zfunc` before `compinit` \
in ~/.zshrc
  fish:  jengine completion fish > ~/.config/fish/completions/jengine.fish
"""


def add_commands(commands: Commands) -> None:
    """Add `diff`, `report`, `table`, `ckpt ls`, `ckpt show`, `ckpt rm` and `completion`."""
    diff = commands.add(
        "diff",
        "jengine.extras.report.diff_command:diff",
        "print the values that differ between two configs",
        commands.config,
    )
    diff.add_argument(
        "other", metavar="OTHER", help="a config file, a work dir or a checkpoint, as CONFIG may be"
    )
    _add_report(commands)
    _add_table(commands)
    _add_ckpt(commands)
    completion = commands.add(
        "completion",
        "jengine.extras.report.completion:run",
        "print a shell's completion script",
        commands.traceback,
    )
    completion.epilog = _COMPLETION_EPILOG
    completion.formatter_class = argparse.RawDescriptionHelpFormatter
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def _add_report(commands: Commands) -> None:
    report = commands.add(
        "report",
        "jengine.extras.report.report_command:run",
        "write or serve a page about one or several runs",
        commands.traceback,
        runs_code=False,
    )
    work_dirs = (
        "a work dir, for its newest run; one of its directories WORK_DIR/TIMESTAMP; or a "
        "directory of work dirs"
    )
    report.add_argument("work_dirs", nargs="+", metavar="WORK_DIR", help=work_dirs)
    report.add_argument(
        "--out",
        default="report.html",
        metavar="FILE",
        help="the page to write (default: report.html)",
    )
    report.add_argument(
        "--png",
        metavar="FILE",
        help="draw the curves into a .png, .pdf or .svg file instead of writing the page",
    )
    report.add_argument(
        "--images",
        type=int,
        metavar="N",
        help="steps to show of each image (default: 8; 1 of over 8 runs)",
    )
    report.add_argument(
        "--serve",
        action="store_true",
        help="serve the page and follow the runs instead of writing it",
    )
    report.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="address to serve on (default: 127.0.0.1)",
    )
    report.add_argument(
        "--port",
        type=int,
        default=8080,
        metavar="PORT",
        help="port to serve on; 0 for any free one",
    )


def _add_table(commands: Commands) -> None:
    text = "print runs with the hyperparameters that differ and their metrics"
    table = commands.add(
        "table",
        "jengine.extras.report.table_command:print_table",
        text,
        commands.traceback,
        runs_code=False,
    )
    work_dirs = (
        "a work dir, for its newest run; one of its directories WORK_DIR/TIMESTAMP; or a sweep's "
        "directory"
    )
    table.add_argument("work_dirs", nargs="+", metavar="WORK_DIR", help=work_dirs)
    table.add_argument(
        "--group", action="store_true", help="one row for the seeds of equal runs: mean ± deviation"
    )
    table.add_argument(
        "--sort",
        metavar="COLUMN",
        help="sort by a column, named as in the table (default: best first)",
    )
    table.add_argument("--reverse", action="store_true", help="reverse the order of the rows")
    table.add_argument(
        "--plot",
        metavar="FILE",
        help="draw a metric over the iterations, mean and spread over seeds (.pdf, .svg or .png)",
    )
    table.add_argument(
        "--metric", metavar="NAME", help="the metric to draw (default: the main one)"
    )
    styles = table.add_mutually_exclusive_group()
    for style in ("csv", "markdown", "latex"):
        styles.add_argument(
            f"--{style}", dest="style", action="store_const", const=style, help=f"print {style}"
        )
    table.set_defaults(style="text")


def _add_ckpt(commands: Commands) -> None:
    files = [commands.traceback]
    ls = commands.add(
        "ckpt ls",
        "jengine.extras.report.ckpt:ls",
        "list the checkpoints of a run and why each is kept",
        *files,
        runs_code=False,
    )
    ls.add_argument("work_dir", metavar="WORK_DIR", help="a run's directory")
    show = commands.add(
        "ckpt show",
        "jengine.extras.report.ckpt:show",
        "show the contents of a checkpoint",
        *files,
        runs_code=False,
    )
    show.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    rm = commands.add(
        "ckpt rm",
        "jengine.extras.report.ckpt:rm",
        "remove checkpoints of a run",
        *files,
        runs_code=False,
    )
    rm.add_argument("work_dir", metavar="WORK_DIR", help="a run's directory")
    rm.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="names of the checkpoints, as shown by `jengine ckpt ls`",
    )
    rm.add_argument(
        "--force",
        action="store_true",
        help="remove the latest too, from which the run would resume",
    )
