"""Calls on arrays without numbers: the bridges of dask and of JAX take them, imported by the first of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..runtime.values import is_word


def lazy_bridge(arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The bridge of dask if any argument is one of its arrays; else None."""
    dask = sys.modules.get("dask.array")
    if dask is None:
        return None
    for x in (*arrays, *keywords.values()):
        if any(isinstance(part, dask.Array) for part in (x if isinstance(x, tuple) else (x,))):
            return import_module(f"{__package__.rpartition('.')[0]}.bridges.dask")
    return None


ARRAY_CALLS = ("chunks", "reference")  # backends that are calls of the arrays' own library


def tracing_bridge(arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The bridge of JAX if any argument is one of its tracers; None for a backend of array calls."""
    jax = sys.modules.get("jax")
    if jax is None or is_word(keywords.get("backend"), ARRAY_CALLS):
        return None
    for x in (*arrays, *keywords.values()):
        parts = x if isinstance(x, tuple) else (x,)
        if any(isinstance(part, jax.core.Tracer) for part in parts):
            return import_module(f"{__package__.rpartition('.')[0]}.bridges.jax")
    return None
