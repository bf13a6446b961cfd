"""Functions of functions: gradients, the influence matrix, what a call would do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from .call import Prepared, prepare, room
from .card import Card
from .cores import matrix_state
from .cores.kinds import Erase
from .cores.matrix_state import chunks, cuda_step, mapped, solved
from .cores.matrix_state.inputs import Inputs
from .ground.namespace import device, dtype_name
from .state_parts import stored


def vjp(fn: Callable[..., Any], *arrays: Any, **options: Any) -> tuple[Any, Callable[..., Any]]:
    """The result of fn(*arrays, **options), and its pullback.

    result is exactly what the plain call returns: out, or (out, state) with return_state=True. pullback(dout,
    dstate=None) gives a named tuple of gradients by input name, of every array that was given and of the state, each
    in its input's shape and dtype; None for what was not given. It may be called any number of times, and gradients can
    be pickled and copied.

    The pullback reads the inputs again: arrays and state must stay as they are until its last call. A NumPy input that
    was changed in place meanwhile is a RuntimeError that names it; all numbers of an array of up to 4096 are compared,
    and of larger ones that many, evenly spread. Of other libraries' arrays nothing is compared. What vjp returned may
    be written to at once.
    Raises TypeError if fn is not a function of this library, and what fn raises.
    """
    rule = getattr(fn, "vjp", None)
    if rule is None:
        raise TypeError(f"vjp: fn is {getattr(fn, '__name__', fn)!r}, expected a function of linattn_np")
    return rule(arrays, options)


def _card(caller: str, fn: Callable[..., Any]) -> Card:
    card = getattr(fn, "card", None)
    if card is None:
        raise TypeError(f"{caller}: fn is {getattr(fn, '__name__', fn)!r}, expected a variant of linattn_np")
    return card


def influence_matrix(fn: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """The matrix A with out = A v of a variant that is linear in its values: (..., H, T, T), no initial state.

    Where a token has n micro-steps, with a value each, A is (..., H, T, T n), the steps of a token side by side.

    A_ij is how much of token j's value reaches token i. Where something acts on the value channels one by one (gv;
    z, or D (H, V), of mamba2) there is one matrix a channel: (..., H, V, T, T). The values given fix batch, T, H, V
    and the dtype; their numbers do not matter. Memory grows with T^2.
    """
    card = _card("influence_matrix", fn)
    for name in ("state", "return_state", "overwrite_state"):
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"influence_matrix: {name} is given, expected none: A is of a call that starts from zero")
    call = prepare(card, arrays, options)
    xp, c, specs = call.plan.xp, call.variables, card.specs(call.options)
    if call.inputs.q is None:
        raise TypeError(f"influence_matrix: {card.query} is None, expected an array: A is what the queries read")
    given = {n: getattr(c, n) for n in card.arrays if getattr(c, n) is not None}
    given |= {n: call.options[option] for n, (option, _) in card.named.items() if n not in given}
    v = given[card.value]
    batch, (*steps, H, V) = v.shape[: len(c.sizes.batch)], v.shape[len(c.sizes.batch) :]
    count = prod(steps)
    one_hot = xp.reshape(xp.eye(count, dtype=v.dtype, device=device(v)), (*steps, 1, count))
    kept = {n: x for n, x in call.options.items() if n in card.options or n in ("scale", "cu_seqlens", "chunk_size")}
    by_channel = [n for n in given if n != card.value and _on_values(given[n], specs[n])]

    def matrix(channel: int) -> Any:
        changed = {card.value: xp.broadcast_to(one_hot, (*batch, *steps, H, count))}
        for n in by_channel:
            x = given[n]
            changed[n] = xp.broadcast_to(x[..., channel : channel + 1], (*x.shape[:-1], count))
        out = fn(**{**given, **changed}, **kept, backend=call.options["backend"])  # (..., i, H, j)
        return xp.moveaxis(out, -2, -3)

    A = xp.stack([matrix(e) for e in range(V)], axis=-3) if by_channel else matrix(0)
    return call.library.give_back(A)


def _on_values(x: Any, spec: str) -> bool:
    """Whether an array has the value axis: its last letter is V."""
    letters = [choice.split() for choice in spec.split("|")]
    return letters[-1][-1] == "V" and (len(letters) == 1 or x.ndim == len(letters[-1]))


@dataclass(frozen=True)
class Explanation:
    """What a call would do, without doing it."""

    function: str
    backend: str
    reason: str
    others: dict[str, str]  # the other backends, and why not
    form: str
    chunk_size: int | None
    compute_dtype: str
    operations: int  # floating-point operations of the products of the forward pass
    operations_per_token: float  # of one state (one head)
    bytes: int  # inputs read once and outputs written once

    def __str__(self) -> str:
        lines = [
            f"{self.function}: backend {self.backend} ({self.reason})",
            *(f"  not {name}: {why}" for name, why in self.others.items()),
            f"  {self.form}" + (f", chunks of {self.chunk_size}" if self.chunk_size else "")
            + f", computed in {self.compute_dtype}",
            f"  {self.operations:,} operations ({self.operations_per_token:,.0f} a token and state)",
            f"  {self.bytes:,} bytes in and out",
        ]
        return "\n".join(lines)


def explain(fn: Callable[..., Any], *arrays: Any, **options: Any) -> Explanation:
    """Which backend a call takes and why, its form, and its operations and bytes by the formulas."""
    card = _card("explain", fn)
    call = prepare(card, arrays, options)
    memories, where = _memories(call.inputs), room(call.inputs)
    last = memories[-1]
    choice = matrix_state.choose(card.name, last, call.plan, call.options["backend"])
    how = choice.backend.how
    reason = f"{choice.reason}; {how(matrix_state.Call(last, call.plan))}" if how else choice.reason
    if choice.backend.name == "numba" and any(memory.gv is not None for memory in memories):
        reason += "; a decay on the value axis walks the tokens forward, and goes back in chunks"
    if hasattr(where, "how"):
        reason += f"; {where.how(card.name, call.inputs, call.plan, choice.backend.name)}"
    reason += "".join(f"; {name} is stored in {kind}" for name, kind in stored(call.given_state).items())
    total = each = 0.0
    for memory in memories:
        form, C = _form(call, memory, choice.backend.name)
        one, all_of_it = _operations(memory, call.plan.causal, form, C or 0)
        each, total = each + one, total + all_of_it
    v, q = getattr(call.variables, card.value), call.inputs.q
    if where is solved:
        more = solved.operations_per_token(call.inputs, C or 1, _readers(last))
        each, total = each + more, total + more * prod(v.shape[:-1])
    moved = sum(_bytes(x) for n in card.arrays if (x := getattr(call.variables, n)) is not None)
    moved += sum(_bytes(S) for S in (call.state if isinstance(call.state, tuple) else [call.state]) if S is not None)
    if q is not None:
        queries = getattr(call.variables, card.query)
        heads = max(v.shape[-2], queries.shape[-2])
        moved += prod(queries.shape[:-2]) * heads * v.shape[-1] * WIDTH.get(dtype_name(v), 2)
    return Explanation(
        card.name, choice.backend.name, reason, choice.others, form, C,
        dtype_name(call.plan.xp.empty(0, dtype=call.plan.dtype)), round(total), each, moved,
    )


def _memories(inputs: Any) -> list[Inputs]:
    """The room's inputs of every memory of a call, that of the values last."""
    if hasattr(inputs, "memories"):
        return inputs.memories()
    return [inputs.memory(inputs.v)] if hasattr(inputs, "memory") else [inputs]


def _readers(x: Inputs) -> int:
    """Queries of a token of one state."""
    H = x.v.shape[-2]
    return 0 if x.q is None else max(x.q.shape[-2], H) // H if H else 1


def _operations(x: Inputs, causal: bool, form: str, C: int) -> tuple[float, float]:
    """Operations of the products of one memory's forward pass: (a token of one state, all)."""
    (*_, T, H, V), K, q = x.v.shape, x.k.shape[-1], x.q
    readers = _readers(x)
    each = operations_per_token(x.erase, form, C, K, V, T, readers if causal else 0)
    total = each * prod(x.v.shape[:-1])
    if causal or q is None:
        return each, total
    return each, total + 2 * K * V * prod(q.shape[:-2]) * readers * H  # write everything, then read


def _form(call: Prepared, x: Inputs, backend: str) -> tuple[str, int | None]:
    if backend == "reference" or (backend == "cuda" and cuda_step.takes(call.plan)):
        return "recurrent form", None
    T = x.v.shape[-3]
    if backend == "numba":
        if not _is_mapped(call) and matrix_state.NUMBA.module.walks_tokens(x, call.plan):
            return "recurrent form", None
        return "chunk form", min(call.plan.chunk_size or matrix_state.COMPILED_CHUNK, max(T, 1))
    C = min(chunks.chunk_length(call.plan, T), max(T, 1))
    return ("parallel form in tiles" if chunks.is_parallel(call.plan, T) else "chunk form"), C


def _is_mapped(call: Prepared) -> bool:
    """Whether features are made in chunks."""
    return room(call.inputs) is mapped and mapped.is_compiled(call.card.name, call.inputs, call.plan,
                                                              call.options["backend"])  # fmt: skip


def operations_per_token(erase: Erase, form: str, C: int, K: int, V: int, T: int, queries: int = 1) -> float:
    """Operations of the products of the forward pass, a token of one state (a product of m x n x p counts 2 m n p).

    `queries` readers want an output, one more reads in order to erase; each meets every writer (k, and b if FREE).
    """
    erasers, writers = {Erase.NONE: (0, 1), Erase.DELTA: (1, 1), Erase.FREE: (1, 2)}[erase]
    readers = queries + erasers
    if form == "recurrent form":
        return 2 * (readers + writers) * K * V
    applied = queries * writers + max(erasers * writers - 1, 0)  # grams that multiply values; the last one is solved
    inside = readers * writers * 2 * C * K + applied * 2 * C * V + erasers * (C - 1) * V
    if form == "chunk form":
        return inside + 2 * (readers + writers) * K * V if readers else 2 * writers * K * V
    earlier = max(T - C, 0) / 2  # tokens of earlier tiles, on average
    return inside + readers * writers * earlier * 2 * (K + V)


WIDTH = {"float64": 8, "float32": 4}  # bytes a number; 2 for the rest


def _bytes(x: Any) -> int:
    if isinstance(x, tuple):
        return sum(map(_bytes, x))
    return prod(x.shape) * WIDTH.get(dtype_name(x), 2)
