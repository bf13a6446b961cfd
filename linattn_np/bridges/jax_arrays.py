"""Concrete JAX arrays in every function of linattn_np: NumPy views on the host, CuPy views on a device.

Tracers are not concrete: a call on them uses array-API calls, or the bridge registered for them.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from array_api_compat import array_namespace

from ..call import dispatch
from ..call.foreign import Rule, check_cotangents, leaves, mapped
from ..call.results import Result, StatesResult
from ..runtime.pools import NO_ROW
from ..spec import VariantSpec
from .programs import MEMORY

Arrays = tuple[Any, ...]
Keywords = Mapping[str, Any]
in_flight: deque[tuple[Any, list[Any]]] = deque()  # of calls on a device: an event after them, their inputs


def bridge_of(kind: type) -> Any:
    """The bridge of a type of arrays: this module for concrete arrays."""
    import linattn_np.bridges.jax_arrays as module

    return module if issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer) else None


def given(arrays: Arrays, keywords: Keywords) -> Any:
    """The first array of a call; None unless all are concrete JAX arrays on one CPU or CUDA device."""
    first = None
    for x in leaves((*arrays, *keywords.values())):
        if isinstance(x, jax.Array):
            if isinstance(x, jax.core.Tracer) or len(x.devices()) > 1 or (first is not None and
                                                                          x.devices() != first.devices()):  # fmt: skip
                return None
            first = x if first is None else first
        elif hasattr(x, "__dlpack__"):
            return None
    return first if first is not None and platform(first) in ("cpu", "gpu") else None


def platform(x: Any) -> str:
    """cpu, gpu or another one."""
    return next(iter(x.devices())).platform


class JaxViews:
    """The arguments of a call as arrays of NumPy, or of CuPy on a device, and the way back."""

    def __init__(self, first: Any):
        self._device = next(iter(first.devices()))
        self._read: list[Any] = []

    @contextlib.contextmanager
    def context(self) -> Any:
        """The device of the call; its inputs stay alive until the kernels have read them.

        On the host results are aligned: JAX copies others.
        """
        if self._device.platform == "cpu":
            memory = sys.modules.get(MEMORY)
            with contextlib.nullcontext() if memory is None else memory.destinations.aligned():
                yield
            return
        import cupy

        with cupy.cuda.Device(self._device.local_hardware_id):
            yield
            event = cupy.cuda.Event(disable_timing=True)
            event.record()
        in_flight.append((event, self._read))
        while in_flight and in_flight[0][0].done:
            in_flight.popleft()

    def call(self, arrays: Arrays, keywords: Keywords) -> tuple[Arrays, dict[str, Any]]:
        """The arguments of a call. A state that is overwritten is copied: JAX arrays do not change."""
        named = {n: mapped(self._enter, x) for n, x in keywords.items()}
        if keywords.get("overwrite_state") is True and "state" in named:
            named["state"] = mapped(lambda S: S.copy() if hasattr(S, "copy") else S, named["state"])
        return tuple(mapped(self._enter, x) for x in arrays), named

    def leave(self, x: Any) -> Any:
        """A result, with JAX arrays in the place of views."""
        return mapped(self._leave, x)

    def _enter(self, x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        if platform(x) == "cpu":
            return np.asarray(x)
        import cupy

        self._read.append(x)
        return cupy.from_dlpack(x)

    def _leave(self, y: Any) -> Any:
        if y is None or self._device.platform != "cpu":
            return y if y is None else jax.dlpack.from_dlpack(y)
        if y.dtype.isbuiltin == 1 and y.flags.c_contiguous and y.flags.writeable:
            return jax.dlpack.from_dlpack(y, self._device)
        return jax.device_put(y, self._device)


def run(spec: VariantSpec, arrays: Arrays, keywords: Keywords) -> Any:
    """The result of a public function."""
    if (first := given(arrays, keywords)) is None:
        return NotImplemented
    views = JaxViews(first)
    with views.context():
        arrays, keywords = views.call(arrays, keywords)
        rows = None
        if keywords.get("overwrite_state") is True and keywords.get("state_rows") is not None:
            keywords, rows = with_a_row_each(keywords, _on_host(keywords["state_rows"]))
        result: Any = dispatch.run(spec, arrays, keywords)
        if rows is not None and isinstance(result, Result | StatesResult) and result.state is not None:
            # the caller's pool does not change: the result has the new rows
            result = result._replace(state=mapped(lambda S: S[rows], result.state))
        return views.leave(result)


def with_a_row_each(keywords: dict[str, Any], rows: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """(the call with further rows of the pool for sequences that have none, the rows of all sequences)."""
    state, without = keywords.get("state"), rows == NO_ROW
    parts = leaves((state,))
    if not without.any() or not all(hasattr(S, "shape") and len(S) > rows.max() for S in parts):
        return keywords, rows  # unchanged; the checks reject it
    count, P = int(without.sum()), len(parts[0])
    rows = rows.copy()
    rows[without] = P + np.arange(count)
    add = lambda S: (xp := array_namespace(S)).concat([S, xp.zeros((count, *S.shape[1:]), dtype=S.dtype)])  # noqa: E731
    fresh = keywords.get("fresh")
    fresh = without if fresh is None else without | _on_host(fresh)
    return keywords | {"state": mapped(add, state), "state_rows": rows, "fresh": fresh}, rows


def _on_host(x: Any) -> np.ndarray:
    return np.asarray(x.get() if hasattr(x, "get") else x)


def run_vjp(name: str, spec: VariantSpec | None, rule: Rule, arrays: Arrays, keywords: Keywords) -> Any:
    """(result, pullback) of rule(arrays, keywords)."""
    if (first := given(arrays, keywords)) is None:
        return NotImplemented
    views = JaxViews(first)
    with views.context():
        result, pullback = rule(*views.call(arrays, keywords))
        result = views.leave(result)

    def of_arrays(*cotangents: Any, **named: Any) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        check_cotangents(name, first, dict(zip(("dout", "dstate", "dstates"), cotangents, strict=False)) | named)
        own = JaxViews(first)
        with own.context():
            d, more = own.call(cotangents, named)
            return own.leave(pullback(*d, **more))

    return result, of_arrays


def apply(name: str, fn: Callable[..., Any], rule: Rule | None, names: tuple[str, ...], keywords: Keywords) -> Any:
    """fn(**keywords)."""
    if (first := given((), keywords)) is None:
        return NotImplemented
    views = JaxViews(first)
    with views.context():
        return views.leave(fn(**views.call((), keywords)[1]))


def explain(name: str, fn: Callable[..., Any], arrays: Arrays, keywords: Keywords) -> Any:
    """fn(*arrays, **keywords) on the views: (an explanation, how the arrays are seen and who differentiates)."""
    if (first := given(arrays, keywords)) is None:
        return NotImplemented
    views, kind = JaxViews(first), "NumPy" if platform(first) == "cpu" else "CuPy"
    with views.context():
        arrays, keywords = views.call(arrays, keywords)
        return fn(*arrays, **keywords), f"{kind} views of JAX arrays, differentiable by la.vjp"
