"""Attacks on a feedback server: each gets the port and a random generator, and returns the server's answer."""

import json
import random
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

HEAD_SECONDS, BODY_SECONDS, MAX_CONNECTIONS = 0.5, 0.8, 64
# What a busy machine with two cores may add to a limit of the server.
MARGIN_SECONDS = 10.0

GOOD = {"prompt": "question", "completion": "answer", "rating": "up"}
LINE = b"POST /v1/feedback HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Broken(AssertionError):
    """The server broke a promise."""


def connect(port: int, timeout: float = HEAD_SECONDS + BODY_SECONDS + MARGIN_SECONDS) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=timeout)


def exchange(port: int, data: bytes) -> str:
    """Sends bytes, and returns the status of the first answer, or how the connection ended."""
    with connect(port) as connection:
        # Closed while it was sent, the answer may have arrived all the same.
        with suppress(OSError):
            connection.sendall(data)
        return read_status(connection)


def read_status(connection: socket.socket) -> str:
    try:
        answer = connection.recv(2**16)
    except TimeoutError:
        raise Broken("the server neither answered nor closed the connection in time") from None
    except OSError:
        return "reset"
    return answer[9:12].decode() if answer.startswith(b"HTTP/1.1 ") else "closed"


def trickle(port: int, start: bytes, piece: bytes) -> str:
    """Sends ``start`` and then a piece at a time, until the server ends it."""
    with connect(port) as connection:
        end = time.monotonic() + HEAD_SECONDS + BODY_SECONDS + MARGIN_SECONDS
        connection.sendall(start)
        connection.settimeout(0.05)
        while time.monotonic() < end:
            try:
                answer = connection.recv(2**16)
                return answer[9:12].decode() or "closed"
            except TimeoutError:
                pass
            except OSError:
                return "reset"
            with suppress(OSError):
                connection.sendall(piece)
    raise Broken("the server waits for a slow client without end")


def slow_head(port: int, random: random.Random) -> str:
    return trickle(port, b"POST /v1/feedback HTTP/1.1\r\nHost: localhost\r\n", b"X-Padding: 1\r\n")


def slow_body(port: int, random: random.Random) -> str:
    return trickle(port, LINE + b"Content-Length: 1000000\r\n\r\n{", b" ")


def slow_chunks(port: int, random: random.Random) -> str:
    return trickle(port, LINE + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n")


def slow_rest(port: int, random: random.Random) -> str:
    """Goes on sending a body after the answer, which did not need it."""
    with connect(port) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        status = read_status(connection)
        end = time.monotonic() + HEAD_SECONDS + BODY_SECONDS + MARGIN_SECONDS
        while time.monotonic() < end:
            try:
                connection.sendall(b" ")
            except OSError:
                return status
            time.sleep(0.05)
    raise Broken("the server reads the rest of a refused request without end")


def silent(port: int, random: random.Random) -> str:
    with connect(port) as connection:
        return read_status(connection)


def many_connections(port: int, random: random.Random) -> str:
    """Opens twice as many connections as there may be, and holds them."""
    connections = []
    try:
        for _ in range(2 * MAX_CONNECTIONS):
            with suppress(OSError):
                connections.append(connect(port))
        time.sleep(0.2)
    finally:
        for connection in connections:
            connection.close()
    return f"{2 * MAX_CONNECTIONS} opened"


def huge_body(port: int, random: random.Random) -> str:
    return exchange(port, LINE + b"Content-Length: 1073741824\r\n\r\n" + b"x" * 2**22)


def huge_chunks(port: int, random: random.Random) -> str:
    return exchange(port, LINE + b"Transfer-Encoding: chunked\r\n\r\n" + (b"8000\r\n" + b"x" * 2**15 + b"\r\n") * 64)


def tiny_chunks(port: int, random: random.Random) -> str:
    return exchange(port, LINE + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 30_000 + b"0\r\n\r\n")


def wrong_length(port: int, random: random.Random) -> str:
    body = json.dumps({**GOOD, "id": f"wrong-{random.random()}"}).encode()
    length = random.choice([b"-1", b"1e3", b"0x10", b"", b"5, 6", b"99999999999999999999999", b"2", b"\xb2"])
    return exchange(port, LINE + b"Content-Length: " + length + b"\r\n\r\n" + body)


def two_lengths(port: int, random: random.Random) -> str:
    return exchange(port, LINE + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}    ")


def bad_host(port: int, random: random.Random) -> str:
    hosts = ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "[::1", "10.0.0.1", "", "localhost/x"]
    host = random.choice(hosts).encode()
    head = random.choice([b"Host: " + host + b"\r\n", b"Host: localhost\r\nHost: " + host + b"\r\n", b""])
    return exchange(port, b"GET /v1/status HTTP/1.1\r\n" + head + b"\r\n")


def bad_method(port: int, random: random.Random) -> str:
    method = random.choice(
        [b"TRACE", b"PUT", b"DELETE", b"CONNECT", b"post", b"G T", b"\0", b"PRI * HTTP/2.0", b"A" * 999]
    )
    return exchange(port, method + b" /v1/feedback HTTP/1.1\r\nHost: localhost\r\n\r\n")


def path_trick(port: int, random: random.Random) -> str:
    paths = ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//v1/status", "/v1/status/../../x", "/v1/%00status"]
    paths += ["/" + "a" * 60_000, "http://evil.example/v1/status", "*", "/v1/status%0d%0aX: y", "/\xff", "/;/v1/status"]
    return exchange(port, b"GET " + random.choice(paths).encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")


def header_flood(port: int, random: random.Random) -> str:
    headers = random.choice([b"X: y\r\n" * 50_000, b"X: " + b"y" * 2**20 + b"\r\n", b"X" * 2**20])
    return exchange(port, LINE + headers + b"\r\n")


def broken_chunks(port: int, random: random.Random) -> str:
    chunks = [
        b"zz\r\n",
        b"-5\r\nabcde\r\n",
        b"f" * 40 + b"\r\n",
        b"5\r\nab\r\n\r\n",
        b"5;" + b"a" * 2**17,
        b"2\r\n{}XX0\r\n\r\n",
    ]
    return exchange(port, LINE + b"Transfer-Encoding: chunked\r\n\r\n" + random.choice(chunks))


def pipelined(port: int, random: random.Random) -> str:
    requests = [b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"]
    requests += [LINE + b"Content-Length: 2\r\n\r\n{}"]
    return exchange(port, b"".join(random.choices(requests, k=50)) + b"garbage\r\n\r\n")


def unread_answers(port: int, random: random.Random) -> str:
    """Asks for more than fits into the buffers of the connection, and takes none of it."""
    with connect(port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(1)
        with suppress(OSError):
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
    return "left"


def torn_request(port: int, random: random.Random) -> str:
    """Ends with a reset in the middle of a request, as a killed client does."""
    body = json.dumps({**GOOD, "id": f"torn-{random.random()}"}).encode()
    data = LINE + b"Content-Length: %d\r\n\r\n" % len(body) + body
    connection = connect(port)
    connection.sendall(data[: random.randrange(len(data) + 1)])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    return "left"


def hostile_json(port: int, random: random.Random) -> str:
    good = json.dumps({**GOOD, "id": "hostile"})
    bodies = [
        good.replace("{", '{"id": "first", ', 1).encode(),
        ("{" + ",".join(f'"k{number}":1' for number in range(60_000)) + ',"k59999":2}').encode(),
        good.replace('"up"', "1e999").encode(),
        good.replace('"up"', "9" * 4000).encode(),
        good.replace('"up"', "NaN").encode(),
        good.replace("question", "\\ud800").encode(),
        good.encode("utf-16"),
        b"\xff" * 1000,
        b"[" * 500_000,
        b'{"a":' * 100_000,
        json.dumps({**GOOD, "id": "x" * 900_000}).encode(),
    ]
    body = random.choice(bodies)
    return exchange(port, LINE + b"Content-Length: %d\r\n\r\n" % len(body) + body)


# The statuses that are right answers. Connections may be closed at any time, since there are too many.
ALLOWED: dict[Callable[[int, random.Random], str], tuple[str, ...]] = {
    slow_head: ("408",),
    slow_body: ("408",),
    slow_chunks: ("408",),
    slow_rest: ("404",),
    silent: ("408",),
    many_connections: (f"{2 * MAX_CONNECTIONS} opened",),
    # 408 where the rest of the body, which is read and discarded, takes too long.
    huge_body: ("408", "413"),
    huge_chunks: ("408", "413"),
    tiny_chunks: ("400",),
    wrong_length: ("400", "413"),
    two_lengths: ("400",),
    bad_host: ("400", "421"),
    bad_method: ("400", "404", "405"),
    path_trick: ("400", "404"),
    header_flood: ("400",),
    broken_chunks: ("400", "408"),
    pipelined: ("200", "404", "422"),
    unread_answers: ("left",),
    torn_request: ("left",),
    hostile_json: ("400", "422"),
}
# 408 where this machine is too busy to send a request in half a second.
ENDINGS = ("closed", "reset", "503", "408")
