"""A forwarder on loopback in front of an S3 server: it logs every request, and makes those fail that a test picks.

    with CountingProxy.before(server.port) as proxy:
        storage = open_storage(place.uri, {**place.options, "endpoint_url": proxy.endpoint})
        proxy.add(Fault("reset_after", method="PUT"))
        ...
        assert proxy.counts() == {"PUT": 2, "HEAD": 1}

The Host header goes on unchanged, so that the signature stays valid. Bodies are held whole.
"""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import unquote

_HOP = frozenset(("connection", "keep-alive", "expect", "transfer-encoding"))
_NO_BODY = frozenset((204, 304))


@dataclass(frozen=True)
class Request:
    """What passed, or what a fault was made of."""

    method: str
    target: str  # path and query, as sent
    headers: dict[str, str] = field(repr=False)  # of the request, in lower case
    status: int  # as answered to the client; 0 if it was not
    sent: int  # bytes of the request's body
    received: int  # bytes of the answer's body

    @property
    def path(self) -> str:
        return unquote(self.target.partition("?")[0])


FaultKind = Literal["status", "delay", "late", "reset_before", "reset_after", "half"]


@dataclass
class Fault:
    """What happens to requests that match: a number of times, after a number of them went through.

    kind: "status": answered with `status` and `code` or `body`, never forwarded. "delay": forwarded `delay_s` later. "late": answered `delay_s` later.
    "reset_before": the connection is reset, nothing forwarded. "reset_after": reset after the server has done it.
    "half": half of the answer's body, then the connection is reset.
    """

    kind: FaultKind
    method: str = ".*"  # a pattern for the whole method
    target: str = ""  # a pattern to find in path and query
    times: int = 1
    after: int = 0
    status: int = 500
    code: str = "InternalError"
    body: bytes = b""
    delay_s: float = 0.0
    hits: int = 0

    def strikes(self, method: str, target: str) -> bool:
        """Count the request, and say whether it fails."""
        if not re.fullmatch(self.method, method) or not re.search(self.target, target) or self.times <= self.hits:
            return False
        if self.after:
            self.after -= 1
            return False
        self.hits += 1
        return True


class CountingProxy(ThreadingHTTPServer):
    """Forwards what it gets to a port of this host."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = port
        self._log: list[Request] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    @classmethod
    @contextmanager
    def before(cls, port: int) -> Iterator[CountingProxy]:
        """Forward to the port until the end of the block."""
        with cls(port) as proxy:
            thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
            thread.start()
            try:
                yield proxy
            finally:
                proxy.shutdown()
                thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, fault: Fault) -> Fault:
        """From now on; the first that strikes does."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """No more faults."""
        with self._lock:
            self._faults.clear()

    def requests(self) -> list[Request]:
        """All since the start or the last `forget`."""
        with self._lock:
            return list(self._log)

    def forget(self) -> None:
        with self._lock:
            self._log.clear()

    def counts(self) -> dict[str, int]:
        """Requests by method."""
        return dict(Counter(each.method for each in self.requests()))

    def log(self, request: Request) -> None:
        with self._lock:
            self._log.append(request)

    def fault(self, method: str, target: str) -> Fault | None:
        with self._lock:
            return next((fault for fault in self._faults if fault.strikes(method, target)), None)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: CountingProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    _upstream: http.client.HTTPConnection | None = None

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault(self.command, self.path)
        if fault is not None and fault.kind == "delay":
            time.sleep(fault.delay_s)
            fault = None
        if fault is None or fault.kind in ("reset_after", "half", "late"):
            status, headers, answer = self._ask(body)
        elif fault.kind == "status":
            text = (
                f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>A fault of the test.</Message></Error>"
            )
            status, headers, answer = fault.status, [("Content-Type", "application/xml")], fault.body or text.encode()
        if fault is not None and fault.kind in ("reset_before", "reset_after"):
            self._log(0, body, b"")
            self._reset()
            return
        if fault is not None and fault.kind == "late":
            self._log(0, body, b"")
            time.sleep(fault.delay_s)
            self._answer(status, headers, answer, answer)
            return
        sent = answer[: len(answer) // 2] if fault is not None and fault.kind == "half" else answer
        self._log(status, body, sent)
        self._answer(status, headers, answer, sent)
        if len(sent) < len(answer):
            self._reset()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815 -- names of the standard library

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        for again in (True, False):
            if self._upstream is None:
                self._upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=120)
            try:
                self._upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in _HOP:
                        self._upstream.putheader(name, value)
                self._upstream.endheaders(body)
                with self._upstream.getresponse() as answer:
                    return answer.status, answer.getheaders(), answer.read()
            except (http.client.HTTPException, OSError) as error:  # a kept connection that the server has closed
                self._upstream.close()
                self._upstream = None
                if not again or not isinstance(error, http.client.RemoteDisconnected | BrokenPipeError):
                    break
        text = b"<Error><Code>ServiceUnavailable</Code></Error>"
        return 503, [("Content-Type", "application/xml")], text

    def _answer(self, status: int, headers: list[tuple[str, str]], answer: bytes, sent: bytes) -> None:
        self.send_response_only(status)
        length = next((value for name, value in headers if name.lower() == "content-length"), str(len(answer)))
        for name, value in headers:
            if name.lower() not in (*_HOP, "content-length"):
                self.send_header(name, value)
        if status not in _NO_BODY:
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(answer)))
        self.end_headers()
        self.wfile.write(sent)

    def _log(self, status: int, body: bytes, sent: bytes) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.log(Request(self.command, self.path, headers, status, len(body), len(sent)))

    def _reset(self) -> None:
        """RST, not FIN: what a dying host or a firewall sends."""
        self.close_connection = True
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        with suppress(OSError, ValueError):  # reset
            super().finish()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the standard library's name
        """Nothing on stderr."""
