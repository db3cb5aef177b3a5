"""`jengine report`: one HTML page about one or several runs."""

import argparse
import contextlib
from collections.abc import Sequence

from jengine.config.errors import ConfigError
from jengine.extras.report.figures import draw_page
from jengine.extras.report.page import collect_data
from jengine.extras.report.page import report as report
from jengine.extras.report.server import make_server
from jengine.extras.report.table_format import count
from jengine.logging.console import escape_control

_REFRESH = 5.0  # seconds


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Write the page, or serve it until an interrupt."""
    if args.images is not None and args.images < 1:
        raise ConfigError(f"`--images` must be at least 1, got {args.images}")
    if args.png:
        data = collect_data(args.work_dirs, args.images)
        draw_page(args.png, data)
        print(escape_control(f"{args.png} shows the curves of {count(len(data['runs']), 'run')}"))
        return
    page = report(*args.work_dirs, images=args.images)
    if not args.serve:
        page.save(args.out)
        shown = count(len(page.runs), "run")
        print(escape_control(f"{args.out} shows {shown}: {', '.join(page.runs)}"))
        for name, note in page.notes():
            print(escape_control(f"  {name}: {note}"))
        return
    with make_server(
        lambda: collect_data(args.work_dirs, args.images), args.host, args.port, _REFRESH
    ) as server:
        print(
            f"http://{args.host}:{server.server_address[1]} follows the runs; Ctrl-C ends it.",
            flush=True,
        )
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
