"""Runs an app as an HTTP server that slow, greedy and broken clients cannot keep from serving the others."""

import asyncio
import ipaddress
import json
import re
import socket
from collections.abc import Callable, Collection
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from posttrain.store.errors import UserError
from posttrain.store.signals import END_SIGNALS, handle_signals

HEAD_SECONDS = 10.0
BODY_SECONDS = 30.0
ANSWER_SECONDS = 5.0
MAX_CONNECTIONS = 256

# The kernel's queue, and the connections accepted at once: with those served, below the usual 1,024 open files.
_BACKLOG = 512
_HEAD_BYTES = 16 * 1024
# Read from a connection before the others have their turn: a body in chunks of one byte takes seconds a megabyte.
_READ_BYTES = 4096
_SHUTDOWN_SECONDS = 10

_TAKE_ANSWER = "take the answer"

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


SECURITY_HEADERS = {
    # Scripts, styles and pictures of the package only, and none that a record or a name smuggles into a page.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # The address of a one-time link must not reach another site. Not "no-referrer", with which browsers send forms
    # without their origin.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Sent with every answer."""


class LimitedProtocol(H11Protocol, asyncio.BufferedProtocol):
    """A connection that must send each request, and take each answer, within a limited time.

    A client that misses its time is answered 408 and closed. When there are too many connections, the one that has
    kept the server waiting the longest is answered 503 and closed: a client that sends its request at once is served.
    """

    def __init__(
        self,
        *arguments: Any,
        head_seconds: float,
        body_seconds: float,
        answer_seconds: float,
        max_connections: int,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._seconds: dict[Any, float] = {
            h11.IDLE: head_seconds,
            h11.SEND_BODY: body_seconds,
            _TAKE_ANSWER: answer_seconds,
        }
        self._max_connections = max_connections
        self._buffer = bytearray(_READ_BYTES)
        self._timer: asyncio.TimerHandle | None = None
        self._awaits: Any = None
        """The client's next action: to send the head (`h11.IDLE`) or the body of a request, or to take its answer."""
        self._since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The body follows the head in a second packet, which Nagle's algorithm would hold back until the client has
        # acknowledged the first: 40 ms for each request on a busy connection. asyncio switches it off for sockets of
        # its own only.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._set_deadline()
        if len(self.connections) > self._max_connections:
            waiting = [each for each in self.connections if isinstance(each, LimitedProtocol) and each._awaits]
            # This one waits, too, but since just now: it is refused only if all others are being answered.
            longest = min(waiting, key=lambda each: each._since, default=self)
            longest._refuse(503, "too many connections; try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._awaits = None
        if self._timer is not None:
            self._timer.cancel()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def handle_events(self) -> None:
        super().handle_events()
        self._set_deadline()

    def on_response_complete(self) -> None:
        # The next request gets its time from here on, even if the last one's body is still to come.
        self._awaits = None
        super().on_response_complete()
        self._set_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_deadline()

    def shutdown(self) -> None:
        super().shutdown()
        if self._awaits is not None:
            self._restart_timer(min(self._seconds[self._awaits], _SHUTDOWN_SECONDS / 2))

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not a valid HTTP request")

    def _set_deadline(self) -> None:
        """Starts the time of the client's next action, unless it is the same as before."""
        if self.transport.is_closing():
            return
        state = self.conn.their_state
        awaits = _TAKE_ANSWER if self.flow.write_paused else state if state in self._seconds else None
        if awaits is self._awaits:
            return
        self._awaits, self._since = awaits, self.loop.time()
        self._restart_timer(None if awaits is None else self._seconds[awaits])

    def _restart_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._time_out)

    def _time_out(self) -> None:
        self._refuse(408, "the request took too long")

    def _refuse(self, status: int, line: str) -> None:
        """Answers, if no answer was begun, and closes the connection."""
        self._awaits = None  # one of many is chosen to be closed, and this one is about to be
        if self.cycle is not None:
            # The app must not answer in the moment before the loss of the connection is noticed.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"error": line}).encode()
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
                *SECURITY_HEADERS.items(),
            ]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.transport.get_write_buffer_size():
            # To close would wait for a client that may never read.
            self.transport.abort()
        else:
            self.transport.close()


class _Server(uvicorn.Server):
    """Tells the app that it is about to end, so that open streams do."""

    on_exit: Callable[[], object]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.on_exit()


class HostCheck:
    """Passes on requests to hosts in a list, and answers others with 421.

    Without it, a web page could give its own name the server's address, and so read answers that a browser keeps from
    other sites (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], *, any_address: bool = False) -> None:
        """Wraps ``app``.

        Args:
            hosts: names and addresses, without ports.
            any_address: accept every IP address: of these, none can be given to another server.
        """
        self._app = app
        self._hosts = {host.lower() for host in hosts}
        self._any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = host_name(Headers(scope=scope).get("host", ""))
            if host not in self._hosts and not (self._any_address and _is_address(host)):
                line = "this host is not served here; `posttrain serve --allowed-host NAME` allows it"
                await JSONResponse({"error": line}, 421, SECURITY_HEADERS)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def host_name(host: str) -> str:
    """Returns the name or address of a ``Host`` header, without port, brackets and letter case; else nothing."""
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:@/\s]+?)\.?)(?::\d*)?", host.lower())
    return (match[1] or match[2]) if match else ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def serve(
    app: ASGIApp,
    host: str,
    port: int,
    announce: Callable[[str], object],
    *,
    allowed_hosts: Collection[str] = (),
    head_seconds: float = HEAD_SECONDS,
    body_seconds: float = BODY_SECONDS,
    answer_seconds: float = ANSWER_SECONDS,
    max_connections: int = MAX_CONNECTIONS,
    trusted_proxies: Collection[str] = (),
    on_end: Callable[[], object] = lambda: None,
) -> None:
    """Serves an app until SIGTERM, SIGHUP or Ctrl-C; finishes requests in progress first.

    Args:
        port: 0 for any that is free.
        announce: called with the address once it listens, such as ``http://127.0.0.1:8600``.
        allowed_hosts: what a request's ``Host`` may be, besides this machine's local names and ``host``; if ``host``
            stands for all addresses, besides the machine's name and every address.
        head_seconds, body_seconds, answer_seconds: for a client to send the head of a request, to send its body, and to
            take the answer.
        max_connections: kept open at once.
        trusted_proxies: addresses of proxies whose ``X-Forwarded-For`` says which client sent a request.
        on_end: called once the server is asked to end, before it waits for open requests.

    Raises:
        UserError: the address cannot be listened on.
    """
    everywhere = host in ("0.0.0.0", "::", "")
    own_name = socket.gethostname() if everywhere else host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # Bound before uvicorn starts, so that port 0 can be announced and a taken port is a user's error.
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        what = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise UserError(what, where="--port", fix="give another port or host") from None
    protocol = partial(
        LimitedProtocol,
        head_seconds=head_seconds,
        body_seconds=body_seconds,
        answer_seconds=answer_seconds,
        max_connections=max_connections,
    )
    config = uvicorn.Config(
        HostCheck(app, {*LOCAL_NAMES, own_name, *allowed_hosts}, any_address=everywhere),
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        # A warning for each broken request would let a stranger fill the disk of the log.
        log_level="error",
        access_log=False,
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=list(trusted_proxies),
        server_header=False,
        backlog=_BACKLOG,
        h11_max_incomplete_event_size=_HEAD_BYTES,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    server = _Server(config)

    def end(number: int, frame: object) -> None:
        server.should_exit = True
        on_end()

    # uvicorn handles some signals itself while it runs.
    server.on_exit = on_end

    # uvicorn raises the signal again after its shutdown; our handler absorbs it, so that the process exits with 0.
    with handle_signals(END_SIGNALS, end), listener:
        address = f"[{host}]" if ":" in host else host
        announce(f"http://{address}:{listener.getsockname()[1]}")
        server.run(sockets=[listener])
