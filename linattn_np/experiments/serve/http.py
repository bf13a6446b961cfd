"""HTTP 1.1 for an engine: what a client sends, and lines of JSON as tokens are drawn.

POST /generate {"prompt": "text" or numbers, "count": 100, "temperature": 0.7, "seed": 1}
    200: a line for each token, {"token": 101, "text": "e"}; the last one {"done": true, ...} or {"error": ...}
    400, 413: a request that is wrong, or too long; 503: too many wait, come again after Retry-After seconds
GET /status: slots, those that are free, requests that wait, prefixes found, tokens of drafts and those accepted
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from .engine import Ask, Engine, Failed, Full

TYPES = {"prompt": (str, list), "count": (int,), "temperature": (int, float), "seed": (int,)}
BYTES = 256


class Wrong(Exception):
    """A request that is answered by an error."""

    def __init__(self, status: HTTPStatus, message: str, **headers: str):
        super().__init__(message)
        self.status, self.headers = status, headers


@dataclass(frozen=True)
class Limits:
    """What a client may do."""

    prompt: int = 2**16  # tokens
    count: int = 4096
    body: int = 2**20  # bytes
    patience: float = 30.0  # seconds for a client to send its request, or to read what was sent


LIMITS = Limits()


class Server:
    """Answers clients of an engine with `vocabulary` tokens."""

    def __init__(self, engine: Engine, vocabulary: int, limits: Limits = LIMITS):
        self._engine, self._vocabulary, self._limits = engine, vocabulary, limits

    async def client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request.   For asyncio.start_server."""
        try:
            try:
                await self._answered(reader, writer)
            except Wrong as problem:
                _whole(writer, problem.status, {"error": str(problem)}, **problem.headers)
                await self._sent(writer)
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            writer.transport.abort()  # the client is gone, or reads nothing
        finally:
            writer.close()

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._limits.patience):
            method, path, body = await _request(reader, self._limits.body)
        if (method, path) == ("GET", "/status"):
            _whole(writer, HTTPStatus.OK, self._status())
            await self._sent(writer)
        elif (method, path) == ("POST", "/generate"):
            await self._streamed(_ask(body, self._vocabulary, self._limits), reader, writer)
        else:
            raise Wrong(HTTPStatus.NOT_FOUND, f"{method} {path} is unknown, expected POST /generate or GET /status")

    async def _streamed(self, ask: Ask, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The tokens of a request, until the client is gone."""
        try:
            stream = self._engine.submit(ask)
        except Full as problem:
            raise Wrong(HTTPStatus.SERVICE_UNAVAILABLE, str(problem), **{"Retry-After": "1"}) from None
        gone = asyncio.ensure_future(_left(reader))
        gone.add_done_callback(lambda _: stream.close())
        text, begun = codecs.getincrementaldecoder("utf-8")("replace"), False
        try:
            async for token in stream:
                if not begun:
                    _head(writer, HTTPStatus.OK, {"Transfer-Encoding": "chunked"}, "application/x-ndjson")
                    begun = True
                own = {"text": text.decode(bytes([token]))} if self._vocabulary == BYTES else {}
                _chunk(writer, {"token": token, **own})
                await self._sent(writer)
            if not stream.is_closed:
                _chunk(writer, {"done": True, "prompt": len(ask.prompt), "count": ask.count})
        except Failed as problem:
            if not begun:
                raise Wrong(HTTPStatus.INTERNAL_SERVER_ERROR, str(problem)) from None
            _chunk(writer, {"error": str(problem)})
        finally:
            stream.close()
            gone.cancel()
        writer.write(b"0\r\n\r\n")
        await self._sent(writer)

    async def _sent(self, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._limits.patience):
            await writer.drain()

    def _status(self) -> dict[str, Any]:
        engine, store = self._engine, self._engine.store
        return {"slots": engine.slots, "free": len(engine.free), "waiting": len(engine.waiting),
                "prefixes": len(store), "lookups": store.lookups, "hits": store.hits,
                "drafted": engine.drafted, "accepted": engine.accepted}  # fmt: skip


async def _left(reader: asyncio.StreamReader) -> None:
    """Return when the client has closed the connection, or sends something more."""
    with contextlib.suppress(ConnectionError):
        await reader.read(1)


async def _request(reader: asyncio.StreamReader, most: int) -> tuple[str, str, bytes]:
    """(method, path, body).   Raises Wrong for what is no request."""
    bad = HTTPStatus.BAD_REQUEST
    try:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except asyncio.LimitOverrunError:
        raise Wrong(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the header is too long") from None
    if len(parts := first.split(" ")) != 3 or not parts[2].startswith("HTTP/1."):
        raise Wrong(bad, f"{first[:80]!r} is no request of HTTP 1.1")
    header = {n.strip().lower(): x.strip() for n, _, x in (line.partition(":") for line in lines)}
    if "transfer-encoding" in header:
        raise Wrong(HTTPStatus.LENGTH_REQUIRED, "the body comes in chunks, expected a Content-Length")
    if not (length := header.get("content-length", "0")).isdecimal():
        raise Wrong(bad, f"Content-Length is {length!r}, expected a number")
    if int(length) > most:
        raise Wrong(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has {length} bytes, expected at most {most}")
    return parts[0], parts[1], await reader.readexactly(int(length))


def _ask(body: bytes, vocabulary: int, limits: Limits) -> Ask:
    """The request in a body.   Raises Wrong for another one."""
    bad = HTTPStatus.BAD_REQUEST
    try:
        found = json.loads(body)
    except ValueError as problem:
        raise Wrong(bad, f"the body is no JSON: {problem}") from None
    if not isinstance(found, dict):
        raise Wrong(bad, "the body is no object of JSON")
    for name, x in found.items():
        if name not in TYPES:
            raise Wrong(bad, f"{name} is unknown, expected {', '.join(TYPES)}")
        if type(x) not in TYPES[name]:
            raise Wrong(bad, f"{name} is a {type(x).__name__}, expected {' or '.join(t.__name__ for t in TYPES[name])}")
    given = found.get("prompt", "")
    if isinstance(given, str):
        if vocabulary != BYTES:
            raise Wrong(bad, "prompt is a text, expected numbers: the tokens of the model are no bytes")
        given = list(given.encode("utf-8", "replace"))
    if not all(type(n) is int and 0 <= n < vocabulary for n in given):
        raise Wrong(bad, f"prompt has other items than tokens, expected whole numbers from 0 to {vocabulary - 1}")
    if not 0 < len(given) <= limits.prompt:
        raise Wrong(HTTPStatus.REQUEST_ENTITY_TOO_LARGE if given else bad,
                    f"prompt has {len(given)} tokens, expected 1 to {limits.prompt}")  # fmt: skip
    ask = Ask(tuple(given), **{"count": 100} | {n: x for n, x in found.items() if n != "prompt"})
    if not 0 < ask.count <= limits.count:
        raise Wrong(bad, f"count is {ask.count}, expected a number from 1 to {limits.count}")
    if not 0 <= ask.temperature < float("inf"):
        raise Wrong(bad, f"temperature is {ask.temperature}, expected a number from 0")
    if not 0 <= ask.seed < 2**63:
        raise Wrong(bad, f"seed is {ask.seed}, expected a number from 0")
    return ask


def _head(writer: asyncio.StreamWriter, status: HTTPStatus, headers: dict[str, str], kind: str) -> None:
    lines = {"Content-Type": kind, "Connection": "close", **headers}
    text = "".join(f"{n}: {x}\r\n" for n, x in lines.items())
    writer.write(f"HTTP/1.1 {status.value} {status.phrase}\r\n{text}\r\n".encode())


def _whole(writer: asyncio.StreamWriter, status: HTTPStatus, answer: dict[str, Any], **headers: str) -> None:
    body = json.dumps(answer).encode() + b"\n"
    _head(writer, status, {"Content-Length": str(len(body)), **headers}, "application/json")
    writer.write(body)


def _chunk(writer: asyncio.StreamWriter, line: dict[str, Any]) -> None:
    body = json.dumps(line).encode() + b"\n"
    writer.write(b"%x\r\n%s\r\n" % (len(body), body))
