"""A first call that compiles says so once: a log record of the logger "linattn_np", of level WARNING, after a second.

Compilations that follow one another within a second belong to one call.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("linattn_np")
SLOW = 1.0  # seconds after which a call says that it compiles, and of a pause after which another call does
clock = time.perf_counter
_call = {"began": -SLOW, "ended": -SLOW, "said": 0.0}


@contextlib.contextmanager
def compiling(what: str, path: Path | None) -> Iterator[None]:
    """Context of a compilation; path: the file of the code, None without one."""
    now = clock()
    if now - _call["ended"] > SLOW:
        _call.update(began=now, said=0.0)
    _say(what, path)
    try:
        yield
    finally:
        _call["ended"] = clock()
        _say(what, path)


def _say(what: str, path: Path | None) -> None:
    if _call["said"] or clock() - _call["began"] < SLOW:
        return
    _call["said"] = 1.0
    where = "not stored: the next process compiles again"
    if path is not None:
        where = f"stored in {path.parent} for later processes"
    logger.warning("a first call compiles (%s and others); the code is %s", what, where)
