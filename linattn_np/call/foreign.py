"""Arrays of other frameworks: a bridge computes their calls on NumPy or CuPy views and converts the results back.

A bridge is a module of linattn_np/bridges with the functions of `Bridge`. It is imported, by name, by the first call on
an array of its framework, so that no framework is imported for anybody else. `register` gives a type of arrays, such as
a tracer, a bridge of its own. What no bridge takes is computed by array-API calls in its own library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from ..runtime.arrays import enter
from ..runtime.values import is_word
from ..spec import VariantSpec

HOMES = {"torch": "bridges.torch", "jaxlib": "bridges.jax_arrays"}  # by the package that defines the type


Rule = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, Callable[..., Any]]]


class Bridge(Protocol):
    """What a bridge does. Each function may return NotImplemented: the call is then made by array-API calls.

    rule: (arrays, keywords) -> (result, pullback).
    """

    def run(self, spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any], /) -> Any:
        """The result of a public function."""
        ...

    def run_vjp(
        self, name: str, spec: VariantSpec | None, rule: Rule, arrays: tuple[Any, ...], keywords: Mapping[str, Any], /
    ) -> Any:
        """(result, pullback) of rule(arrays, keywords), in arrays of the framework; spec: of a variant."""
        ...

    def apply(
        self,
        name: str,
        fn: Callable[..., Any],
        rule: Rule | None,
        names: tuple[str, ...],
        keywords: Mapping[str, Any],
        /,
    ) -> Any:
        """fn(**keywords), differentiable by `rule` if there is one; names: of the arguments that have a gradient."""
        ...

    def explain(
        self, name: str, fn: Callable[..., Any], arrays: tuple[Any, ...], keywords: Mapping[str, Any], /
    ) -> Any:
        """(fn(*arrays, **keywords) on views, how the arrays are seen and who differentiates the call)."""
        ...


bridges: dict[type, Any] = {np.ndarray: None}  # by type of array; None: no bridge
PLAIN = frozenset((type(None), bool, int, float, str, tuple, list))  # what is no array


def register(kind: type, bridge: Any) -> None:
    """Let `bridge` compute the calls on arrays of this type."""
    bridges[kind] = bridge


def bridge_of(arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The bridge of the first array of a call; None without."""
    for x in (*arrays, *keywords.values()):
        kind = type(x)
        if kind in bridges:
            return bridges[kind]
        if kind not in PLAIN and not isinstance(x, tuple):
            bridges[kind] = found = _bridge_of_type(kind)
            return found
    return None


def _bridge_of_type(kind: type) -> Any:
    home = HOMES.get(kind.__module__.split(".")[0])
    if home is None:
        return None
    found = import_module(f"{__package__.rpartition('.')[0]}.{home}")
    return bridges.get(kind, found.bridge_of(kind))


# arrays without numbers: of dask, and the tracers of JAX


def symbolic_bridge(arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The bridge of JAX if any argument is one of its tracers, of dask if one is its array; else None."""
    return tracing_bridge(arrays, keywords) or lazy_bridge(arrays, keywords)


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


def calls_of_loops(keywords: Mapping[str, Any]) -> Any:
    """The module that calls a piece of layers from a program of JAX, if backend="numba" asks for loops there."""
    if not is_word(keywords["backend"], ("numba",)) or tracing_bridge((), keywords) is None:
        return None
    return import_module(f"{__package__.rpartition('.')[0]}.bridges.jax_pieces")


# nested tuples


def mapped(f: Callable[[Any], Any], x: Any) -> Any:
    """f of x, or of every item of a tuple, which may be a named one."""
    if not isinstance(x, tuple):
        return f(x)
    each = [mapped(f, y) for y in x]
    return type(x)(*each) if hasattr(x, "_fields") else tuple(each)


def leaves(x: Any) -> list[Any]:
    """The items of nested tuples."""
    return [y for item in x for y in leaves(item)] if isinstance(x, tuple) else [x]


def check_cotangents(fn: str, one: Any, cotangents: Mapping[str, Any]) -> None:
    """Raise TypeError for a cotangent of another library or device than `one`, the first array of the call."""
    enter(fn, {"the call": one, **{name: d for name, x in cotangents.items() for d in leaves(x)}})
