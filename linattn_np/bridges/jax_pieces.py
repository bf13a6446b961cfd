"""The pieces of linattn_np.nn on traced JAX arrays with backend="numba": one operation, which calls compiled loops.

Without it a traced piece is operations of JAX, which XLA fuses and JAX differentiates. With it the program calls the
piece on views of XLA's buffers when it runs, and its gradients are those of la.vjp, once, in reverse mode. A mapped
axis of vmap becomes a batch axis if every array has one, else the calls come one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.buffer_callback import buffer_callback

from ..call.results import Result, gradients_of
from ..nn.declaration import PIECES, Piece
from .jax_arguments import MOST, Operation, fixed, is_on_device, traced
from .programs import writing_to


class Traced(NamedTuple):
    """A call without its arrays."""

    name: str
    arrays: tuple[str, ...]
    options: tuple[tuple[str, Hashable], ...]

    @property
    def piece(self) -> Piece:
        return PIECES[self.name]

    @property
    def floats(self) -> tuple[str, ...]:
        """The arrays that have a gradient."""
        return tuple(n for n in self.arrays if n in self.piece.names)

    def keywords(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """The arguments of the call."""
        return dict(self.options) | dict(zip(self.arrays, arrays, strict=True))

    def results(self, arrays: Sequence[Any]) -> list[Any]:
        """Shapes and dtypes of the results."""
        return [jax.ShapeDtypeStruct(shape, kind) for shape, kind in self.piece.results(self.keywords(arrays))]


def run(piece: Piece, given: Mapping[str, Any]) -> Any:
    """The result of a piece."""
    call, arrays = _call_of(piece, given)
    return _public(call, differentiable(call)(*arrays))


def run_vjp(piece: Piece, given: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """(result, pullback)."""
    call, arrays = _call_of(piece, given)
    results, vjp = jax.vjp(differentiable(call), *arrays)

    def pullback(dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name."""
        if dout is None and dstate is None:
            raise TypeError(f"{piece.name}: the pullback got no cotangent, expected dout")
        d = (jnp.zeros_like(y) if x is None else jnp.asarray(x, y.dtype)
             for x, y in zip((dout, dstate), results, strict=False))  # fmt: skip
        grads = dict(zip(call.arrays, vjp(tuple(d)), strict=True))
        return gradients_of(piece.names, *(grads.get(n) for n in piece.names))

    return _public(call, results), pullback


def _public(call: Traced, results: Sequence[Any]) -> Any:
    return Result(*results) if dict(call.options).get("return_state") else results[0]


def _call_of(piece: Piece, given: Mapping[str, Any]) -> tuple[Traced, list[Any]]:
    """A call, and its arrays.   Raises TypeError, and ValueError where the program does not run on a CPU."""
    fn = piece.name
    if is_on_device():
        raise ValueError(f"{fn}: backend is 'numba' in a program for a device, expected None: its loops are of a CPU")
    for name in ("out", "state_rows"):
        if given.get(name) is not None:
            raise TypeError(f"{fn}: {name} was given with arrays that JAX traces, expected None")
    arrays = {n: traced(fn, n, given[n]) for n in piece.axes if given[n] is not None}
    options = tuple((n, fixed(fn, n, x)) for n, x in given.items() if n not in piece.axes)
    return Traced(fn, tuple(arrays), options), list(arrays.values())


@functools.lru_cache(maxsize=MOST)
def differentiable(call: Traced) -> Operation:
    """arrays -> results, with the gradients of la.vjp."""
    forward, backward = operation(call, False), operation(call, True)

    def plain(*arrays: Any) -> Any:
        return forward(*arrays)

    def bwd(arrays: Any, cotangents: Any) -> Any:
        grads = iter(once(call, backward)(*arrays, *cotangents))
        return tuple(next(grads) if n in call.floats else None for n in call.arrays)

    plain.__name__ = plain.__qualname__ = call.name
    function = jax.custom_vjp(plain)
    function.defvjp(lambda *arrays: (once(call, forward)(*arrays), arrays), bwd)
    return function


def once(call: Traced, one: Operation) -> Operation:
    """An operation of a first derivative: an error says that it cannot be differentiated."""

    @jax.custom_vjp
    def function(*given: Any) -> Any:
        return one(*given)

    def fwd(*given: Any) -> Any:
        raise NotImplementedError(
            f"{call.name}: a second derivative in JAX, expected first derivatives: without backend='numba' JAX "
            "differentiates array operations, any number of times"
        )

    function.defvjp(fwd, lambda residuals, d: ())
    return function


@functools.lru_cache(maxsize=MOST)
def operation(call: Traced, is_backward: bool) -> Operation:
    """The forward, or the backward of (arrays, cotangents), as an operation with a rule for vmap."""
    count = len(call.arrays)

    @custom_vmap
    def one(*given: Any) -> Any:
        arrays = given[:count]
        shapes = call.results(arrays)
        if is_backward:
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype)
                      for n, x in zip(call.arrays, arrays, strict=True) if n in call.floats]  # fmt: skip
        return tuple(buffer_callback(_host(call, is_backward), tuple(shapes))(*given))

    def rule(size: int, is_mapped: Sequence[bool], *given: Any) -> Any:
        if not _are_batched(call, is_mapped):
            return _sequentially(one, is_mapped, given)
        rows = [x if own else jnp.broadcast_to(x, (size, *x.shape)) for x, own in zip(given, is_mapped, strict=True)]
        found = one(*rows)
        return found, (True,) * len(found)

    one.def_vmap(rule)
    return one


def _are_batched(call: Traced, is_mapped: Sequence[bool]) -> bool:
    """Whether a mapped axis may be a batch axis: of a function of each batch row alone, without parameters."""
    piece, options = call.piece, dict(call.options)
    every = all(piece.axes[n].removeprefix("whole ").startswith("... ") or n == "state" for n in call.arrays)
    return every and options.get("cu_seqlens") is None and not callable(piece.kind.out) and any(
        is_mapped[: len(call.arrays)])  # fmt: skip


def _sequentially(one: Operation, is_mapped: Sequence[bool], given: Sequence[Any]) -> Any:
    """The calls one after the other."""

    def row(own: Sequence[Any]) -> Any:
        left = iter(own)
        return one(*(next(left) if is_own else x for x, is_own in zip(given, is_mapped, strict=True)))

    found = jax.lax.map(row, [x for x, is_own in zip(given, is_mapped, strict=True) if is_own])
    return found, (True,) * len(found)


@functools.lru_cache(maxsize=2 * MOST)
def _host(call: Traced, is_backward: bool) -> Callable[..., None]:
    """What the program calls: one function for each call, since JAX caches compiled code by function."""
    piece, count = call.piece, len(call.arrays)

    def forward(_: Any, out: Sequence[Any], *given: Any) -> None:
        with writing_to([np.asarray(x) for x in out]) as put:
            result = piece(**call.keywords(_seen(given)))
            put(result if isinstance(result, Result) else (result,))

    def backward(_: Any, out: Sequence[Any], *given: Any) -> None:
        arrays = _seen(given)
        with writing_to([np.asarray(x) for x in out]) as put:
            grads = piece.vjp((), call.keywords(arrays[:count]))[1](*arrays[count:])
            put([getattr(grads, n) for n in call.floats])

    return backward if is_backward else forward


def _seen(given: Sequence[Any]) -> list[np.ndarray]:
    """Read-only views."""
    arrays = [np.asarray(x) for x in given]
    for x in arrays:
        x.flags.writeable = False
    return arrays
