"""Functions as layers: those of this library with their pullbacks, and small ones with the transpose beside them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..call.results import Result
from ..call.vjp import vjp
from ..catalog import variants
from ..ops.sums import sum_to
from ..runtime.arrays import compat
from ..runtime.values import shown
from .init import Init, size
from .layer import Layer, Mode, Named, Values, made, plus

NO_PARAMETERS: dict[str, Init] = {}


@made
def function(fn: Callable[..., Any], given: str = "x", parameters: Mapping[str, Init] = NO_PARAMETERS,
             **options: Any) -> Layer:  # fmt: skip
    """A variant or a piece of la.nn: the arrays `given` are values, those in `parameters` are parameters.

    A function with a state carries it from call to call.
    """
    names, known = given.split(), inspect.signature(fn).parameters
    order = [n for n in known if n in {*names, *parameters}]
    has_state = "state" in known

    def run(mode: Mode, params: Named, xs: Values, states: Named) -> Any:
        each = dict(zip(names, xs, strict=True)) | params
        arrays, more = {n: each[n] for n in order}, dict(options)
        begin = states.get("state")
        if has_state and begin is not None:
            more["state"] = begin
        if has_state and mode.states:
            more["return_state"] = True
        found, pull = evaluated(mode, fn, **arrays, **more)
        y, ends = (found.out, {"state": found.state}) if isinstance(found, Result) else (found, {})

        def pullback(dys: Values, dends: Named) -> tuple[Named, Values, Named]:
            end = dends.get("state")
            grads = pull(dys[0]) if end is None else pull(dys[0], end)
            dstates = {} if begin is None else {"state": grads.state}
            return ({n: getattr(grads, n) for n in parameters}, [getattr(grads, n, None) for n in names], dstates)

        return [y], ends, pullback

    return Layer(run, parameters, names, name=getattr(fn, "__name__", "function"))


def variant(name: str) -> Any:
    """The function of a variant.   Raises ValueError for a name without one."""
    if (fn := next((f for f in variants() if f.__name__ == name), None)) is None:
        raise ValueError(f"mix: name is {shown(name)}, expected a variant of linattn_np")
    return fn


def evaluated(mode: Mode, fn: Callable[..., Any], *arrays: Any, **options: Any) -> tuple[Any, Any]:
    """(the result of fn, its pullback if one is wanted)."""
    return vjp(fn, *arrays, **options) if mode.pullback else (fn(*arrays, **options), None)


@made
def formula(f: Callable[..., Any], f_vjp: Callable[..., Any], given: str = "x",
            parameters: Mapping[str, Init] = NO_PARAMETERS) -> Layer:  # fmt: skip
    """y = f(*arrays, *parameters); f_vjp(dy, *arrays, *parameters) returns their gradients, None for no gradient."""
    names = given.split()

    def run(mode: Mode, params: Named, xs: Values, states: Named) -> Any:
        each = [*xs, *(params[n] for n in parameters)]

        def pullback(dys: Values, dends: Named) -> tuple[Named, Values, Named]:
            d: Sequence[Any] = f_vjp(dys[0], *each)
            return dict(zip(parameters, d[len(names) :], strict=True)), d[: len(names)], {}

        return [f(*each)], {}, pullback

    return Layer(run, parameters, names)


@made
def by_heads(*shape: int) -> Layer:
    """(..., H K) as (..., H, K)."""
    width = size(shape)
    return formula(lambda x: x.reshape(*x.shape[:-1], *shape), lambda dy, x: [dy.reshape(*x.shape[:-1], width)])


@made
def merged(*shape: int) -> Layer:
    """(..., H, V) as (..., H V)."""
    width, n = size(shape), len(shape)
    return formula(lambda x: x.reshape(*x.shape[:-n], width), lambda dy, x: [dy.reshape(x.shape)])


def add() -> Layer:
    """x + y of one shape."""
    return formula(plus, lambda dy, x, y: [dy, dy], "x y")


@made
def multiply(given: str = "x y", parameters: Mapping[str, Init] = NO_PARAMETERS) -> Layer:
    """x y, whose shapes are broadcast."""
    return formula(lambda x, y: x * y, lambda dy, x, y: [summed(dy * y, x), summed(dy * x, y)], given, parameters)


@made
def affine(times: float = 1.0, plus: float = 0.0) -> Layer:
    """times x + plus, of two numbers."""
    return formula(lambda x: times * x + plus, lambda dy, x: [times * dy])


@made
def parameter(fn: Callable[..., Any], raw: Init, name: str = "x", **options: Any) -> Layer:
    """fn of a parameter: an array that does not depend on the tokens."""
    return function(fn, "", {name: raw}, **options)


def summed(d: Any, x: Any) -> Any:
    """d, summed over the axes along which x was stretched."""
    return sum_to(compat.array_namespace(d), d, tuple(x.shape))
