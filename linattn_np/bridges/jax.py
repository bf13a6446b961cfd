"""JAX: our functions on traced arrays, inside jit, grad, vmap and scan.

A call on tracers becomes one operation of the program that JAX compiles. At run time it calls the NumPy or CuPy path on
views of XLA's buffers. Gradients come from `la.vjp`, by jax.custom_vjp; reverse mode only, once. Under vmap the
mapped axis becomes a batch axis.

The call path imports this module when an argument is a tracer. backend="chunks" or "reference" traces array operations
of JAX instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.buffer_callback import buffer_callback

from ..call.binding import normalise
from ..call.results import gradients_of
from ..runtime.shapes import flatten, has_time
from ..spec import VariantSpec
from .device_programs import DeviceProgram, device_of, execute
from .jax_arguments import MOST, Operation, fixed, is_on_device, traced
from .programs import Program, Signature, is_state, leaves, unleaves
from .shapes import Abstract


def run(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The result of the public function on traced arrays."""
    signature, given = signature_of(spec, arrays, keywords)
    return _public(signature, given, differentiable(signature)(*given))


def run_vjp(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """(result of the public function, pullback) on traced arrays."""
    signature, given = signature_of(spec, arrays, keywords)
    results, vjp = jax.vjp(differentiable(signature), *given)
    result = _public(signature, given, results)

    def pullback(dout: Any = None, dstate: Any = None, dstates: Any = None) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        each = (dout, dstate, dstates)[: len(result)] if _is_several(result) else (dout,)
        d = [jnp.zeros_like(y) if x is None else jnp.asarray(x, y.dtype)
             for part, own in zip(each, result if _is_several(result) else (result,), strict=True)
             for x, y in _beside(part, own)]  # fmt: skip
        grads = {n: jnp.zeros(x.shape, x.dtype) if y.dtype == jax.dtypes.float0 else y  # numbers of tokens
                 for n, x, y in zip(signature.names, given, vjp(tuple(d)), strict=True)}  # fmt: skip
        parts = [grads[n] for n in signature.names if is_state(n)]
        state = None if not parts else parts[0] if signature.state is None else signature.state(*parts)
        return gradients_of((*spec.arrays, "state"), *(grads.get(n) for n in spec.arrays), state)

    return result, pullback


def _is_several(x: Any) -> bool:
    return isinstance(x, tuple) and not isinstance(x, Abstract)


def _beside(d: Any, own: Any) -> list[tuple[Any, Any]]:
    """Pairs of a cotangent, or None, and the array it belongs to."""
    owns = list(leaves(own))
    return list(zip([None] * len(owns) if d is None else leaves(d), owns, strict=True))


def _public(signature: Signature, given: Sequence[Any], results: Sequence[Any]) -> Any:
    return unleaves(program_of(signature, _abstract(given)).result, iter(results))


# calls without their arrays


def signature_of(
    spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Signature, list[Any]]:
    """A call on tracers: its static arguments, and its arrays.   Raises TypeError."""
    if len(arrays) > len(spec.arrays):
        raise TypeError(
            f"{spec.name}: {len(arrays)} arrays were given by position, expected at most "
            f"{len(spec.arrays)}: {', '.join(spec.arrays)}; options go by keyword"
        )
    named: dict[str, Any] = dict(zip(spec.arrays, arrays, strict=False))
    if twice := named.keys() & keywords.keys():
        raise TypeError(f"{spec.name}: {min(twice)} was given twice, by position and by keyword")
    given = {n: x for n, x in (named | dict(keywords)).items() if n in spec.arrays and not isinstance(x, str | None)}
    options = {n: x for n, x in (named | dict(keywords)).items() if n not in given and n != "state"}
    state = normalise(spec, "state", keywords.get("state"), {**spec.options, **options})
    kind = type(state) if isinstance(state, tuple) else None
    given |= {} if state is None else flatten("state", state)
    static = tuple((n, fixed(spec.name, n, x)) for n, x in options.items() if n not in spec.arrays or x is not None)
    return Signature(spec, tuple(given), kind, static), [traced(spec.name, n, x) for n, x in given.items()]


def program_of(signature: Signature, given: tuple[Abstract, ...]) -> Program:
    """The program of a call of these shapes."""
    return _program(signature, given, is_on_device())


@functools.lru_cache(maxsize=MOST)
def _program(signature: Signature, given: tuple[Abstract, ...], on_device: bool) -> Program:
    return DeviceProgram(signature, given) if on_device else Program(signature, given)


def _abstract(arrays: Sequence[Any]) -> tuple[Abstract, ...]:
    return tuple(Abstract(tuple(x.shape), np.dtype(x.dtype)) for x in arrays)


# operations


@functools.lru_cache(maxsize=MOST)
def differentiable(signature: Signature) -> Operation:
    """arrays -> results, with its pullback."""
    forward, saving, backward = (operation(signature, kind) for kind in ("forward", "saving", "backward"))

    def call(*arrays: Any) -> Any:
        return forward(*arrays)

    def fwd(*arrays: Any) -> Any:
        if dict(signature.options).get("overwrite_state"):
            raise ValueError(
                f"{signature.spec.name}: overwrite_state=True was given to a call that JAX "
                "differentiates, expected False: its backward needs the state that would be overwritten"
            )
        program = program_of(signature, _abstract(arrays))
        found = saving(*arrays)
        count = len(program.results)
        return found[:count], (*arrays, *(found[n] for n in program.saved_results), *found[count:])

    def bwd(residuals: Any, cotangents: Any) -> Any:
        return backward(*residuals, *cotangents)

    call.__name__ = call.__qualname__ = signature.spec.name
    function = jax.custom_vjp(call)
    function.defvjp(fwd, bwd)
    return function


@functools.lru_cache(maxsize=MOST)
def operation(signature: Signature, kind: str) -> Operation:
    """One function of a program, as an operation of JAX with a rule for vmap."""

    def one(*given: Any) -> Any:
        count = len(signature.names)
        program = program_of(signature, _abstract(given[:count]))
        if kind != "backward" or _abstract(given[count : -len(program.results)]) == _residuals_of(program):
            return callback(program, kind)(*given)
        return callback(program, "pullback")(*given[:count], *given[-len(program.results) :])

    @custom_vmap
    def call(*given: Any) -> Any:
        return one(*given)

    def rule(size: int, is_mapped: Sequence[bool], *given: Any) -> Any:
        return mapped(signature, kind, call, size, is_mapped, given)

    call.def_vmap(rule)
    return call if kind == "forward" else once(signature, call)


def _dtype(result: Abstract) -> Any:
    """The dtype of a result in JAX: without 64-bit types, numbers of tokens have 32."""
    return jax.dtypes.canonicalize_dtype(result.dtype)


def _residuals_of(program: Program) -> tuple[Abstract, ...]:
    """The residuals of a program, its saved results as JAX has them."""
    count = len(program.saved_results)
    return tuple(Abstract(x.shape, _dtype(x) if n < count else x.dtype) for n, x in enumerate(program.residuals))


def once(signature: Signature, call: Operation) -> Operation:
    """An operation of a first derivative: an error says that it cannot be differentiated."""

    @jax.custom_vjp
    def function(*given: Any) -> Any:
        return call(*given)

    def fwd(*given: Any) -> Any:
        raise NotImplementedError(
            f"{signature.spec.name}: a second derivative in JAX, expected first derivatives: "
            "with backend='chunks' JAX differentiates array operations, any number of times"
        )

    function.defvjp(fwd, lambda residuals, d: ())
    return function


def callback(program: Program, kind: str) -> Operation:
    """The call of a program's function at run time."""
    out, scratch = program.outputs(kind), program.scratch(kind)
    count = len(program.results) if kind in ("forward", "saving") else 0
    dtypes = [_dtype(x) if n < count else x.dtype for n, x in enumerate((*out, *scratch))]
    shapes = [jax.ShapeDtypeStruct(x.shape, d) for x, d in zip((*out, *scratch), dtypes, strict=True)]
    recorded = isinstance(program, DeviceProgram) and program.is_recorded(kind)
    call = buffer_callback(_host(program, kind), tuple(shapes), command_buffer_compatible=recorded)
    return lambda *given: call(*given)[: len(out)]


@functools.lru_cache(maxsize=3 * MOST)
def _host(program: Program, kind: str) -> Callable[..., None]:
    """The host callbacks of a program: one function for each, since JAX caches compiled code by function."""
    here = not isinstance(program, DeviceProgram)

    def host(context: Any, out: Sequence[Any], *given: Any) -> None:
        if (device := device_of(out[0])) is not None:
            execute(program, kind, (device, context.stream), out, given)
            return
        arrays = [np.asarray(x) for x in given]
        for x in arrays:
            x.flags.writeable = False
        getattr(program if here else program.unsaved, kind)([np.asarray(x) for x in out], arrays)

    return host


# vmap


def mapped(
    signature: Signature, kind: str, call: Operation, size: int, is_mapped: Sequence[bool], given: Sequence[Any]
) -> tuple[Any, Any]:
    """The rule of vmap: (results, which of them are mapped). The mapped axis is the first one, and a batch axis.

    One after the other: ragged batches, calls with constants of the heads, and cotangents of one forward.
    """
    count = len(signature.names)
    spec, options = signature.spec, dict(signature.options)
    has_batch = all(is_state(n) or has_time(spec.arrays[n].axes) for n in signature.names)
    if options.get("cu_seqlens") is not None or not has_batch or not any(is_mapped[:count]):
        return _sequentially(call, is_mapped, given)
    rows = [x if own else jnp.broadcast_to(x, (size, *x.shape)) for x, own in zip(given, is_mapped, strict=True)]
    arrays = rows[:count]
    one = program_of(signature, tuple(Abstract(x.shape[1:], np.dtype(x.dtype)) for x in arrays))
    program, results = program_of(signature, _abstract(arrays)), len(one.results)
    if kind == "saving":
        return _saving_mapped((one, program), call(*arrays), size)
    if kind == "backward":
        rest = _residuals((one, program), rows[count:-results], given[-results - 1], is_mapped[-results - 1])
        found = operation(signature, "pullback")(*arrays, *rows[-results:]) if rest is None else call(
            *arrays, *rest, *rows[-results:])  # fmt: skip
    else:
        found = call(*rows)
    return found, (True,) * len(found)


def _is_alike(one: Program, program: Program, size: int) -> bool:
    """Whether the sizes of the batch's residuals are the stacked sizes of its rows; a number is that of all rows."""
    a, b = one.saved, program.saved
    if not program.can_map or a is None or b is None:
        return False
    if a.saved_results != b.saved_results or len(a.extras) != len(b.extras):
        return False
    return all((size * prod(x.shape) if y.shape else 1, x.dtype) == (prod(y.shape), y.dtype)
               for x, y in zip(a.extras, b.extras, strict=True))  # fmt: skip


def _saving_mapped(programs: tuple[Program, Program], found: Any, size: int) -> tuple[Any, Any]:
    """What `saving` returns for the batch: residuals with a mapped axis if they can have one, else empty ones."""
    one, program = programs
    count = len(one.results)
    results, extras, key = found[:count], found[count:-1], found[-1]
    own = one.saving_results[count:-1]
    alike = _is_alike(one, program, size)
    if alike:
        extras = [x.reshape(size, *y.shape) if x.shape else jnp.broadcast_to(x, (size,))
                  for x, y in zip(extras, own, strict=True)]  # fmt: skip
    else:
        extras = [jnp.zeros(0, _dtype(y)) for y in own]
    key = key if alike else jnp.zeros(0, key.dtype)
    return (*results, *extras, key), (*(True,) * count, *(alike,) * len(own), False)


def _residuals(programs: tuple[Program, Program], rows: Sequence[Any], key: Any, is_mapped: bool) -> Any:
    """The saved results, residuals and key that `backward` takes for the batch; None without."""
    one, program = programs
    wanted = _residuals_of(program)
    if is_mapped or not _is_alike(one, program, size := rows[0].shape[0]) or [x.size for x in rows[:-1]] != [
        prod(y.shape) if y.shape else size for y in wanted[:-1]]:  # fmt: skip
        return None
    return [*(x.reshape(y.shape) if y.shape else x[0] for x, y in zip(rows[:-1], wanted[:-1], strict=True)), key]


def _sequentially(call: Operation, is_mapped: Sequence[bool], given: Sequence[Any]) -> tuple[Any, Any]:
    """The calls one after the other."""

    def one(rows: Sequence[Any]) -> Any:
        left = iter(rows)
        return call(*(next(left) if own else x for x, own in zip(given, is_mapped, strict=True)))

    found = jax.lax.map(one, [x for x, own in zip(given, is_mapped, strict=True) if own])
    return found, tuple(True for _ in found)
