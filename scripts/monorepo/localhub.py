"""A Hub on loopback, for building, publishing and loading kernels where no Hub can be reached.

It serves what `huggingface_hub` and `kernels` ask of a Hub, keeps everything on disk, and can be
told to fail. Files of 10 MB and more, and those that .gitattributes names, are uploaded by LFS; the
client must not use xet then (HF_HUB_DISABLE_XET=1).

What tests may ask of a hub in another process, in JSON:
    POST /_local/faults    the fields of a `Fault`
    DELETE /_local/faults
    GET /_local/log        a list of `Logged`
"""

from __future__ import annotations

import re
import shutil
import socket
import socketserver
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

from monorepo.hubapi import (
    ORGANISATIONS,
    TOKENS,
    Api,
    Organisation,
    Reply,
    Request,
    json_object,
    ok,
    refusal,
)
from monorepo.hubstore import Commit, HubError, Store

__all__ = ["Fault", "Faults", "LocalHub", "Logged", "Organisation"]


class Logged(NamedTuple):
    """A request and its answer: the percent-decoded path with its query; status 0 if cut."""

    method: str
    path: str
    status: int


@dataclass
class Fault:
    """A failure to be shown to requests.

    Args:
        method: HTTP method it applies to.
        path: Regular expression, searched in the percent-decoded path with its query.
        status: Status code to answer with.
        headers: Headers of that answer, such as Retry-After.
        cut: Close the connection: without any answer, or after half of it where `after`.
        delay: Seconds to wait; alone, the request then goes on as if nothing was.
        times: How many requests it strikes.
        after: Carry the request out before failing.
    """

    method: str
    path: str
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    delay: float = 0.0
    times: int = 1
    after: bool = False


class Faults:
    """The failures to come. The first that matches a request strikes it."""

    def __init__(self) -> None:
        """Starts with none."""
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, method: str, path: str, **fields: Any) -> None:
        """Adds one; see `Fault` for the fields.

        Raises:
            TypeError: A field that is not one of a fault's.
            ValueError: A field's value makes no sense.
        """
        fault = Fault(method, path, **fields)
        try:
            re.compile(path)
        except re.error as error:
            raise ValueError(f"path: wanted a regular expression, got {path!r}: {error}") from None
        kinds = (("status", int), ("times", int), ("delay", (int, float)), ("headers", dict))
        for name, kind in kinds:
            value = getattr(fault, name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name}: wanted {kind}, got {value!r}")
        if not (fault.status or fault.cut or fault.delay > 0):
            raise ValueError("wanted at least one of status, cut and delay")
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """Forgets all that have not struck yet."""
        with self._lock:
            self._faults.clear()

    def take(self, method: str, path: str) -> Fault | None:
        """The fault that strikes this request, which counts as one of its times."""
        with self._lock:
            for fault in self._faults:
                if fault.times > 0 and fault.method == method and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    """Reads a request whole, lets the faults and the API answer it, writes the reply."""

    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "LocalHub"
    disable_nagle_algorithm = True
    timeout = 60  # seconds without a byte, after which a connection is closed

    def do_GET(self) -> None:
        body = self._body()
        if body is None:  # cut short: what came is not what the client meant
            self.close_connection = True
            return
        if self.path.startswith("/_local/"):
            self._send(self._control(body))
            return
        shown = unquote(self.path)
        fault = self.server.faults.take(self.command, shown) or Fault("", "")
        if not fault.after:
            self.server.stopping.wait(fault.delay)
        reply = None
        if fault.after or not (fault.status or fault.cut):
            reply = self._answer(body)
        if fault.after:
            self.server.stopping.wait(fault.delay)
        if fault.status:
            message = f"Injected fault {fault.status}"
            reply = refusal(HubError(fault.status, message, headers=fault.headers))
        status = reply.status if reply and not fault.cut else 0
        self.server.log.append(Logged(self.command, shown, status))
        if reply:
            self._send(reply, cut=fault.cut)
        self.close_connection |= fault.cut

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            self._send(refusal(HubError(411, "Wanted a Content-Length")))
            return None
        body = self.rfile.read(int(length))
        return body if len(body) == int(length) else None

    def _answer(self, body: bytes) -> Reply:
        path, _, query = self.path.partition("?")
        base = f"http://{self.headers.get('Host') or self.server.address}"
        try:
            role = self.server.api.role(self.headers.get("Authorization"))
            return self.server.api.answer(
                self.command, path, Request(base, parse_qs(query), body, role)
            )
        except HubError as error:
            return refusal(error)

    def _control(self, body: bytes) -> Reply:
        """Answers /_local/: what tests ask of a hub in another process."""
        try:
            match self.command, self.path:
                case "POST", "/_local/faults":
                    self.server.faults.add(**json_object(body))
                case "DELETE", "/_local/faults":
                    self.server.faults.clear()
                case "GET", "/_local/log":
                    return ok([logged._asdict() for logged in self.server.log])
                case _:
                    raise HubError(404, f"No such route: {self.command} {self.path}")
            return ok({})
        except HubError as error:
            return refusal(error)
        except (TypeError, ValueError) as error:
            return refusal(HubError(400, str(error)))

    def _send(self, reply: Reply, *, cut: bool = False) -> None:
        """Writes a reply, or the first half of it."""
        size = reply.body.stat().st_size if isinstance(reply.body, Path) else len(reply.body)
        if cut and (size == 0 or self.command == "HEAD"):
            return
        self.send_response(reply.status)
        for name, value in {**reply.headers, "Content-Length": size}.items():
            self.send_header(name, re.sub(r"[^\x20-\x7e]", "?", str(value)))
        self.end_headers()
        if self.command == "HEAD":
            return
        with (
            BytesIO(reply.body) if isinstance(reply.body, bytes) else open(reply.body, "rb") as body
        ):
            if cut:
                self.wfile.write(body.read(size // 2))
            else:
                shutil.copyfileobj(body, self.wfile)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: requests are kept in `log`."""


class _Server(socketserver.ThreadingTCPServer):
    """Listens, and keeps what all connections share."""

    allow_reuse_address = True
    request_queue_size = 128
    daemon_threads = False  # closing waits for what is being answered

    def __init__(self, port: int, api: Api, faults: Faults, log: list[Logged]) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.api, self.faults, self.log = api, faults, log
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self.stopping = threading.Event()
        self._connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that went away is no news
            super().handle_error(request, client_address)

    def stop(self) -> None:
        """Finishes what is being answered, then closes every connection."""
        self.stopping.set()
        self.shutdown()
        for connection in list(self._connections):
            try:
                connection.shutdown(
                    socket.SHUT_RD
                )  # an idle client's thread reads the end and leaves
            except OSError:
                continue  # closed meanwhile
        self.server_close()


class LocalHub:
    """A Hub that listens on loopback and keeps its repositories below a directory.

    Args:
        root: The directory, made if missing; one hub at a time may hold it.
        port: TCP port, 0 for any free one.
        organisations: Namespaces that exist, besides the user's own.
        tokens: Token to its role, "read" or "write".

    Example:
        with LocalHub(tmp_path) as hub:
            api = HfApi(endpoint=hub.url, token="hf_write")
            hub.faults.add(method="POST", path="/commit/", status=500, after=True)
    """

    def __init__(
        self,
        root: Path,
        port: int = 0,
        *,
        organisations: Mapping[str, Organisation] = ORGANISATIONS,
        tokens: Mapping[str, str] = TOKENS,
    ) -> None:
        """See the class. Nothing is opened before `start`."""
        self.root, self.port = Path(root), port
        self.organisations, self.tokens = dict(organisations), dict(tokens)
        self.faults = Faults()
        self.log: list[Logged] = []
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> LocalHub:
        """Starts to serve, in a thread of its own.

        Raises:
            ValueError: Another hub holds the root.
            OSError: The port is taken.
        """
        self._store = Store(self.root)
        try:
            api = Api(self._store, self.organisations, self.tokens)
            self._server = _Server(self.port, api, self.faults, self.log)
        except OSError:
            self._store.close()
            raise
        self.port = self._server.server_address[1]
        serve = self._server.serve_forever
        self._thread = threading.Thread(
            target=serve, kwargs={"poll_interval": 0.05}, name="localhub"
        )
        self._thread.start()
        return self

    def stop(self) -> None:
        """Finishes the requests in progress, closes the connections and lets go of the root."""
        if self._server and self._thread:
            self._server.stop()
            self._thread.join()
            self._store.close()
            self._server = self._thread = None

    def __enter__(self) -> LocalHub:
        """Starts the hub."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stops it."""
        self.stop()

    @property
    def url(self) -> str:
        """The endpoint: what HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self.port}"

    def commits(
        self, repo_id: str, revision: str = "main", repo_type: str = "kernel"
    ) -> list[Commit]:
        """A revision's commits, newest first.

        Raises:
            LookupError: There is no such repository or revision.
        """
        repo = self._store.repo(f"{repo_type}s", repo_id)
        if repo is None:
            raise LookupError(f"{repo_id}: no such {repo_type} repository")
        try:
            return self._store.history(repo, revision)
        except HubError as error:
            raise LookupError(f"{repo_id}: {error.message}") from None
