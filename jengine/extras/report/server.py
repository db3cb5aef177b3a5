"""Server for a report that follows the runs."""

import contextlib
import http.server
import ipaddress
import socket
import urllib.parse
from collections.abc import Callable
from typing import Any

from jengine.extras.report.page import render_page, to_json
from jengine.logging.console import escape_control


def make_server(
    collect: Callable[[], dict[str, Any]], host: str, port: int, refresh: float
) -> http.server.ThreadingHTTPServer:
    """Return a server for the report at `/` and the data, from `collect`, at `/data.json`.

    `serve_forever` runs it.

    It answers only requests whose Host is an address or a name of this machine. A port of 0 is any
    free one; an open page requests new data after `refresh` seconds.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if not all(_is_own_name(name, host) for name in self.headers.get_all("Host") or [""]):
                self.send_error(403, "the page is served under the address of this machine only")
            elif path not in ("/", "/data.json"):
                self.send_error(404)
            else:
                try:
                    data = collect()
                except Exception as error:
                    # the run was deleted, for instance; a later request may find it
                    self.send_error(500, escape_control(" ".join(str(error).split())[:200]))
                    return
                if path == "/":
                    self._respond(render_page(data, refresh), "text/html")
                else:
                    self._respond(to_json({**data, "refresh": refresh}), "application/json")

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


def _is_own_name(name: str, host: str) -> bool:
    """Return whether a request's Host is this server: the host, the machine name, or any numeric
    address.
    """
    # A page from another site can make a name resolve to this server (DNS rebinding), and would
    # then read the report.
    with contextlib.suppress(ValueError):  # an invalid address or port
        hostname = urllib.parse.urlsplit(f"//{name}").hostname or ""
        if hostname in ("localhost", host.lower(), socket.gethostname().lower()):
            return True
        ipaddress.ip_address(hostname)
        return True
    return False
