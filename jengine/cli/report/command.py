"""Define the command `jengine report`."""

import argparse
import contextlib
import pathlib
from collections.abc import Sequence
from typing import Any

from jengine.errors import ConfigError

_REFRESH = 5.0  # seconds


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command `report` to `jengine`.

    Args:
      commands: the result of `add_subparsers`.
      common: the parent parser with the options of all commands.
    """
    report = commands.add_parser("report", parents=[common], help="write or serve a page about one or several runs")
    report.add_argument(
        "work_dirs",
        nargs="+",
        metavar="WORK_DIR",
        help="a work dir, for its newest run; one of its directories WORK_DIR/TIMESTAMP; or a directory of work dirs",
    )
    report.add_argument("--out", default="report.html", metavar="FILE", help="the page to write (default: report.html)")
    report.add_argument("--images", type=int, default=8, metavar="N", help="steps to show of each image (default: 8)")
    report.add_argument("--serve", action="store_true", help="serve the page and follow the runs instead of writing it")
    report.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address to serve on (default: 127.0.0.1)")
    report.add_argument("--port", type=int, default=8080, metavar="PORT", help="port to serve on; 0 for any free one")
    report.set_defaults(run=run)


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Write the page, or serve it until an interrupt.

    Raises:
      ConfigError: invalid options. FileNotFoundError: a WORK_DIR has no run. ImportError: plotly is not installed.
    """
    from jengine.cli.report.page import collect_data, compressed_plotly, render_page
    from jengine.cli.report.server import make_server
    from jengine.logging import escape_control

    if args.images < 1:
        raise ConfigError(f"`--images` must be at least 1, got {args.images}")
    compressed_plotly()  # report a missing package before anything is read
    data = collect_data(args.work_dirs, args.images)
    if not args.serve:
        out = pathlib.Path(args.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(render_page(data), encoding="utf-8")
        names = ", ".join(run["name"] for run in data["runs"])
        print(escape_control(f"{out} shows {len(data['runs'])} runs: {names}"))
        for name, note in ((run["name"], note) for run in data["runs"] for note in run["notes"]):
            print(escape_control(f"  {name}: {note}"))
        return
    with make_server(lambda: collect_data(args.work_dirs, args.images), args.host, args.port, _REFRESH) as server:
        print(f"http://{args.host}:{server.server_address[1]} follows the runs; Ctrl-C ends it.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
