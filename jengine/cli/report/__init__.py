"""`jengine report`: one HTML page about one or several runs."""

import argparse
import contextlib
import pathlib
from collections.abc import Sequence

from jengine.cli.report.page import collect_data, compressed_plotly, render_page
from jengine.cli.report.server import make_server
from jengine.errors import ConfigError
from jengine.logging import escape_control

_REFRESH = 5.0  # seconds


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Write the page, or serve it until an interrupt."""
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
