"""Who may ask for the page: the user of this machine, who has the token.

[Note: whom it keeps out]
    another machine            it listens on 127.0.0.1 alone
    another user of this one   every answer needs the token, which the address that is printed has
    a page from elsewhere      a Host that is not this server's (DNS rebinding) is refused; the
                               cookie is SameSite=Strict; nothing is said to other origins
    what a study is called     text is put on the page as text; nothing but the page's own files
                               may run or be loaded (Content-Security-Policy)
"""

from __future__ import annotations

import hmac
import secrets
import sys
import webbrowser
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from shoal.core.errors import ShoalError, SpecError
from shoal.observe import jsonl
from shoal.ui.web.reading import Studies

COOKIE = "shoal"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Page(ThreadingHTTPServer):
    """The server of one directory's studies, on this machine alone; ``url`` has the token."""

    daemon_threads = True

    def __init__(self, directory: Path, port: int = 0) -> None:
        self.studies, self.token = Studies(directory), secrets.token_urlsafe(24)
        super().__init__(("127.0.0.1", port), _Answer)
        number = self.server_address[1]
        self.hosts = {f"127.0.0.1:{number}", f"localhost:{number}"}
        self.url = f"http://127.0.0.1:{number}/?token={self.token}"

    def is_known(self, token: str) -> bool:
        """Whether it is the token; in a time that does not tell how much of it is."""
        return hmac.compare_digest(token.encode(), self.token.encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error; others are told of."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Answer(BaseHTTPRequestHandler):
    """One request. Reads only."""

    server: Page
    server_version, sys_version = "shoal", ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        if self.headers.get("Host") not in self.server.hosts:
            return self._say(HTTPStatus.MISDIRECTED_REQUEST, "this server has another name.")
        token = parse_qs(address.query).get("token", [""])[0]
        if address.path == "/" and token and self.server.is_known(token):
            return self._let_in()
        if not self._has_token():
            return self._say(HTTPStatus.FORBIDDEN, "open the address that shoal ui printed.")
        try:
            self._answer([unquote(part) for part in address.path.split("/")[1:]])
        except SpecError as error:
            self._say(HTTPStatus.NOT_FOUND, str(error))
        except (ShoalError, OSError) as error:
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    def _answer(self, parts: list[str]) -> None:
        studies = self.server.studies
        match parts:
            case [""]:
                self._file("page.html")
            case ["page.js" | "page.css" | "page.svg" as name]:
                self._file(name)
            case ["api", "studies"]:
                self._json({"directory": str(studies.directory), "studies": studies.all()})
            case ["api", "studies", name]:
                self._json(studies.study(name))
            case ["api", "studies", name, "trials", number] if number.isdecimal():
                self._json(studies.trial(name, int(number)))
            case ["api", "studies", name, "chart.svg"]:
                self._send(studies.chart(name).encode(), "image/svg+xml", style=True)
            case _:
                raise SpecError("there is no such page.")

    def _has_token(self) -> bool:
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return False
        return COOKIE in cookie and self.server.is_known(cookie[COOKIE].value)

    def _let_in(self) -> None:
        """Keep the token in a cookie, and the address free of it."""
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/")
        cookie = f"{COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
        self.send_header("Set-Cookie", cookie)
        self.send_header("Content-Length", "0")
        self._end()

    def _file(self, name: str) -> None:
        content = files("shoal.ui.web").joinpath(name).read_bytes()
        self._send(content, _TYPES[name.rpartition(".")[2]])

    def _json(self, value: Any) -> None:
        self._send(jsonl.dumps(value).encode(), "application/json")

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._send(f"{text}\n".encode(), "text/plain; charset=utf-8", status)

    def _send(
        self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, *, style: bool = False
    ) -> None:
        """``style``: an image has styles of its own."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self._end(style=style)
        self.wfile.write(body)

    def _end(self, *, style: bool = False) -> None:
        for name, value in _HEADERS.items():
            own = "style-src 'unsafe-inline'" if style else "style-src 'self'"
            self.send_header(name, value.replace("style-src 'self'", own))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Who looks at a page needs no line for each file of it."""


def serve(directory: Path, port: int, *, browse: bool) -> int:
    """Serve the page until Ctrl-C.

    Raises:
        SpecError: the port is taken, or none.
    """
    try:
        page = Page(directory, port)
    except (OSError, OverflowError) as error:
        raise SpecError(
            f"cannot listen on port {port} of 127.0.0.1: {error}. Give another one, or leave "
            "--port out."
        ) from error
    with page:
        print(f"studies of {directory.resolve()}: {page.url}\nCtrl-C ends it", flush=True)
        if browse:
            webbrowser.open(page.url)
        try:
            page.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)
    return 0
