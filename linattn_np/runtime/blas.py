"""Limits BLAS to one thread while our own threads work; without threadpoolctl BLAS is left unchanged."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

_lock = threading.Lock()
_inside = 0  # callers between enter and exit: the first one sets the limit, the last one restores it
_limit: Any = None


class _Own(threading.local):
    inside = 0  # nesting depth in this thread


_own = _Own()


@functools.cache
def _controller() -> Any:
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limits BLAS to one thread; callers may be nested or concurrent."""
    global _inside, _limit
    with _lock:
        _inside += 1
        if _inside == 1 and _controller() is not None:
            _limit = _controller().limit(limits=1, user_api="blas")
        _own.inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            _own.inside -= 1
            if not _inside and _limit is not None:
                _limit.restore_original_limits()
                _limit = None


def _forget() -> None:
    """A forked child has only the thread that forked: limits of other threads are restored."""
    global _lock, _inside, _limit
    _lock, _inside = threading.Lock(), _own.inside
    if not _inside and _limit is not None:
        _limit.restore_original_limits()
        _limit = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
