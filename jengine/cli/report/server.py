"""Serve a report that follows its runs."""

import http.server
from collections.abc import Callable
from typing import Any

from jengine.cli.report.page import render_page, to_json


def make_server(
    collect: Callable[[], dict[str, Any]], host: str, port: int, refresh: float
) -> http.server.ThreadingHTTPServer:
    """Return a server of the report at `/` and its data at `/data.json`; `serve_forever` runs it.

    Args:
      collect: returns the current data.
      host: the address to listen on.
      port: its port; 0 for any free one.
      refresh: seconds between two requests of an open page for new data.

    Raises:
      OSError: the address is in use.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if path == "/":
                self._respond(render_page(collect(), refresh), "text/html")
            elif path == "/data.json":
                self._respond(to_json({**collect(), "refresh": refresh}), "application/json")
            else:
                self.send_error(404)

        def _respond(self, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing: an open page sends a request every few seconds."""

    return http.server.ThreadingHTTPServer((host, port), Handler)
