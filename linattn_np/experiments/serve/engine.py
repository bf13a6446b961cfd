"""Continuous batching: in each turn one chunk of one prompt, and one token of every sequence that is being continued.

Prompts are computed in chunks of a fixed length from their first token, and a row of a call does not depend on the
others. So a request has the bits of a server that has no other request and stored no prefix.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

import linattn_np as la
from linattn_np.layers import Layer
from linattn_np.train.sampling import draw

from . import drafts as lookups
from .pool import Pool

LOG = logging.getLogger("linattn_np.serve")


class Full(Exception):
    """So many requests wait that no more are taken."""


class Failed(Exception):
    """A request could not be computed."""


@dataclass(frozen=True)
class Ask:
    """A request: `count` tokens after a prompt."""

    prompt: tuple[int, ...]
    count: int
    temperature: float = 0.7  # 0 takes the likeliest token
    seed: int = 1


class Stream:
    """The tokens of one request, as they are drawn: `async for token in stream`. A sequence waits for its reader."""

    def __init__(self, ask: Ask, backlog: int, changed: Callable[[], None], past: lookups.Past | None = None):
        self.ask, self._backlog, self._changed, self._past = ask, backlog, changed, past
        self._tokens: deque[int] = deque()
        self._came = asyncio.Event()
        self._error: Exception | None = None
        self.is_closed = False
        # of the engine
        self.row = -1
        self.rng = np.random.default_rng(ask.seed)
        self.done = 0  # tokens of the prompt that are computed
        self.last: int | None = None
        self.left = ask.count

    def close(self) -> None:
        """No more tokens are wanted: the engine takes the row back."""
        self.is_closed = True
        self._came.set()
        self._changed()

    async def __aiter__(self) -> AsyncIterator[int]:
        """Raises Failed if a token cannot be computed."""
        while True:
            while self._tokens and not self.is_closed:
                self._changed()
                yield self._tokens.popleft()
            if self.is_closed or (self.is_finished and self._error is None):
                return
            if self._error is not None:
                raise Failed(f"{type(self._error).__name__}: {self._error}") from self._error
            self._came.clear()
            await self._came.wait()

    @property
    def is_finished(self) -> bool:
        """Whether the engine has nothing more to compute."""
        return self.is_closed or self._error is not None or not self.left

    @property
    def takes_more(self) -> bool:
        return len(self._tokens) < self._backlog

    def draft(self, most: int) -> list[int]:
        """Tokens that may come next; one token more than these is wanted, and has room."""
        most = min(most, self.left - 1, self._backlog - len(self._tokens) - 1)
        return [] if self._past is None or self.last is None else self._past.draft(most)

    def give(self, found: int | Exception) -> None:
        """The next token, or why there is none."""
        if isinstance(found, Exception):
            self._error = found
        else:
            self._tokens.append(found)
            self.last, self.left = found, self.left - 1
            if self._past is not None:
                self._past.add(found)
        self._came.set()


Found = list[tuple[Stream, int | Exception | None]]  # None: a chunk of the prompt, no token yet


class Engine:
    """Sequences of one model.

    slots       sequences that are computed at the same time, each with a row of the pool of states
    waiting     requests that may wait for a row; more are refused
    chunk_size  tokens of a prompt in one turn; states are kept at its multiples
    max_bytes   of the states that are kept of prompts
    backlog     tokens that a reader may be behind; then its sequence waits, and the others do not
    drafts      tokens that are looked up in the sequence itself, and computed in one call with the next one, at most

    Raises ValueError for a model whose states grow, and for drafts if calls of several tokens have bits of their own.
    """

    def __init__(self, logits: Layer, params: dict[str, Any], *, slots: int = 8, waiting: int = 32,
                 chunk_size: int = 64, max_bytes: int = 2**28, backlog: int = 64,
                 drafts: int = 0):  # fmt: skip
        self._logits, self._params, self._most = logits, params, waiting
        self.pool, self.store = Pool(logits, params, slots), la.StateStore(max_bytes, chunk_size)
        self.slots, self.free, self._backlog = slots, list(range(slots)), backlog
        self._drafts, self.drafted, self.accepted = drafts, 0, 0
        if drafts:
            lookups.check(logits, params, drafts)
        self.active: list[Stream] = []  # the earliest first
        self.waiting: deque[Stream] = deque()
        self._changed = asyncio.Event()

    def submit(self, ask: Ask) -> Stream:
        """The stream of a new request.   Raises Full."""
        if len(self.waiting) >= self._most + len(self.free):
            raise Full(f"{len(self.waiting)} requests wait, expected fewer than {self._most}")
        past = lookups.Past(ask.prompt) if self._drafts else None
        stream = Stream(ask, self._backlog, self._changed.set, past)
        self.waiting.append(stream)
        self._changed.set()
        return stream

    async def run(self) -> None:
        """Compute until this is cancelled. Only computations leave the thread of the event loop, one at a time."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "linattn serve") as thread:
            while True:
                self._changed.clear()
                self._assign()
                prompts = [s for s in self.active if s.last is None][:1]
                tokens = [s for s in self.active if s.last is not None and s.takes_more]
                if not prompts and not tokens:
                    await self._changed.wait()
                    continue
                for stream, found in await loop.run_in_executor(thread, self._iteration, prompts, tokens):
                    if found is not None and not stream.is_closed:
                        stream.give(found)

    def _assign(self) -> None:
        """Take rows of finished sequences back, and give them to requests that wait."""
        self.free += [s.row for s in self.active if s.is_finished]
        self.active = [s for s in self.active if not s.is_finished]
        self.waiting = deque(s for s in self.waiting if not s.is_closed)
        while self.waiting and self.free:
            stream = self.waiting.popleft()
            stream.row = self.free.pop()
            self.active.append(stream)

    # computations, in the other thread

    def _iteration(self, prompts: list[Stream], tokens: list[Stream]) -> Found:
        found: Found = []
        drafted = {s: draft for s in tokens if (draft := s.draft(self._drafts))}
        for stream, draft in drafted.items():
            found += self._verified(stream, draft) or []
        done = {s for s, _ in found}
        by_row = {s.row: s for s in tokens if s not in done}
        each = self._each(prompts, self._prompt) if prompts else []
        for rows in self.pool.together(list(by_row)):
            each += self._each([by_row[n] for n in rows], self._next)
        for stream, logits in each:
            is_last = isinstance(logits, np.ndarray)
            found += self._each([stream], functools.partial(_drawn, logits)) if is_last else [(stream, logits)]
        return found

    def _each(
        self, streams: list[Stream], compute: Callable[[list[Stream]], Iterable[Any]]
    ) -> list[tuple[Stream, Any]]:
        """The results of sequences in one call; if it fails, of each by itself, and the error of those to blame."""
        try:
            return list(zip(streams, compute(streams), strict=True))
        except Exception as problem:
            if len(streams) > 1:
                return [pair for s in streams for pair in self._each([s], compute)]
            LOG.exception("a request of %d tokens failed", len(streams[0].ask.prompt))
            return [(streams[0], problem)]

    def _prompt(self, streams: list[Stream]) -> list[np.ndarray | None]:
        """The next chunk of one prompt: logits (V,) after its last token, else None."""
        (s,) = streams
        prompt, C = s.ask.prompt, self.store.chunk_size
        if not s.done and (lease := self.store.longest(prompt[:-1])) is not None:
            with lease:
                self.pool.unpack(s.row, lease.state)
                s.done = lease.length
        stop = min(len(prompt), (s.done // C + 1) * C)
        state = self.pool.take([s.row]) if s.done else None
        found = self._logits(self._params, np.array([prompt[s.done : stop]]), state=state, return_state=True)
        self.pool.put([s.row], found.state)
        s.done = stop
        if not stop % C:
            self.store.put(prompt[:stop], self.pool.packed(s.row))
        return [found.out[0, -1] if stop == len(prompt) else None]

    def _verified(self, stream: Stream, draft: list[int]) -> Found | None:
        """The tokens after the last one as far as the draft is right, and one more; None if the call fails."""
        state, ids = self.pool.take([stream.row]), np.array([[stream.last, *draft]])
        try:
            called = self._logits(self._params, ids, state=state, return_state=True)
        except Exception:  # a draft is to blame, or the request: it is computed without
            LOG.warning("a draft of %d tokens failed", len(draft), exc_info=True)
            return None
        found: Found = []
        for row, guess in zip(called.out[0], [*draft, None], strict=True):
            found += self._each([stream], functools.partial(_drawn, row))
            if found[-1][1] != guess:
                break
        n, end = len(found), called.state
        if n < ids.shape[1]:
            ((_, end),) = self._each([stream], lambda _: [self._logits(self._params, ids[:, :n], state=state,
                                                                       return_state=True).state])  # fmt: skip
            if isinstance(end, Exception):
                return [(stream, end)]
        self.pool.put([stream.row], end)
        self.drafted, self.accepted = self.drafted + len(draft), self.accepted + n - 1
        return found

    def _next(self, streams: list[Stream]) -> np.ndarray:
        """Logits (B, V) after the last token of each sequence."""
        rows, last = [s.row for s in streams], np.array([s.last for s in streams])
        found = la.step(self._logits, self._params, last, state=self.pool.take(rows), return_state=True)
        self.pool.put(rows, found.state)
        return found.out


def _drawn(logits: np.ndarray, streams: list[Stream]) -> list[int]:
    """The next token of one sequence.   Raises FloatingPointError for logits that are not finite."""
    if not np.isfinite(logits).all():
        raise FloatingPointError("logits are not finite")
    return [draw(logits, s.ask.temperature, s.rng) for s in streams]
