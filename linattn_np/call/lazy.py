"""Calls on lazy arrays: the bridge of dask takes them, which is imported by the first of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def lazy_bridge(arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The bridge of dask if any argument is one of its arrays; else None."""
    dask = sys.modules.get("dask.array")
    if dask is None:
        return None
    for x in (*arrays, *keywords.values()):
        if any(isinstance(part, dask.Array) for part in (x if isinstance(x, tuple) else (x,))):
            return import_module(f"{__package__.rpartition('.')[0]}.bridges.dask")
    return None
