"""explain: the backend of a call and why, its form, its operations and bytes by formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from ..matrix_state import core as matrix_state
from ..matrix_state.types import Erase, Inputs
from ..runtime.arrays import NARROW, dtype_name
from .binding import flatten, prepare, spec_of
from .dispatch import core_of


@dataclass(frozen=True)
class Explanation:
    """How a call would be computed."""

    function: str
    backend: str
    reason: str
    others: dict[str, str]  # each other backend, and why it is not used
    form: str
    chunk_size: int | None
    compute_dtype: str
    operations: int  # floating-point operations of the products of the forward pass
    operations_per_token: float  # per state (head)
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
    spec = spec_of("explain", fn)
    call = prepare(spec, arrays, options)
    x, wanted = call.inputs(), call.options["backend"]
    memories, core = _memories(x), core_of(x)
    last = memories[-1]
    choice = matrix_state.explain_choice(spec.name, last, call.plan, wanted)
    backend, reason = choice.backend, choice.reason
    if backend.describe is not None:
        words = dict.fromkeys(backend.describe(matrix_state.Call(memory, call.plan)) for memory in reversed(memories))
        reason += "".join(f"; {each}" for each in words if each)
    if hasattr(core, "describe"):
        reason += f"; {core.describe(spec.name, x, call.plan, wanted)}"
    reason += "".join(f"; {name} is stored in {kind}" for name, kind in stored(call.given_state).items())
    total = each = 0.0
    for memory in memories:
        form, C = getattr(core, "form", matrix_state.form)(spec.name, x, memory, call.plan, wanted)
        one, all_of_it = _operations(memory, call.plan.causal, form, C or 0)
        each, total = each + one, total + all_of_it
    v, q = getattr(call.variables, spec.change.value), x.q
    if hasattr(core, "operations_per_token"):
        more = core.operations_per_token(x, C or 1, _readers(last))
        each, total = each + more, total + more * prod(v.shape[:-1])
    moved = sum(_bytes(x) for n in spec.arrays if (x := getattr(call.variables, n)) is not None)
    moved += sum(_bytes(S) for S in (call.state if isinstance(call.state, tuple) else [call.state]) if S is not None)
    if q is not None:
        queries = getattr(call.variables, spec.change.query)
        heads = max(v.shape[-2], queries.shape[-2])
        moved += prod(queries.shape[:-2]) * heads * v.shape[-1] * WIDTH.get(dtype_name(v), 2)
    return Explanation(
        spec.name, backend.name, reason, choice.others, form, C,
        dtype_name(call.plan.xp.empty(0, dtype=call.plan.dtype)), round(total), each, moved,
    )


def _memories(inputs: Any) -> list[Inputs]:
    """The core's inputs of every memory of a call; the memory of values is last."""
    if hasattr(inputs, "memories"):
        return inputs.memories()
    return [inputs.memory(inputs.v)] if hasattr(inputs, "memory") else [inputs]


def _readers(x: Inputs) -> int:
    """Queries per token and state."""
    H = x.v.shape[-2]
    return 0 if x.q is None else max(x.q.shape[-2], H) // H if H else 1


def _operations(x: Inputs, causal: bool, form: str, C: int) -> tuple[float, float]:
    """Operations of the products of one memory's forward pass: (per token and state, total)."""
    (*_, T, H, V), K, q = x.v.shape, x.k.shape[-1], x.q
    readers = _readers(x)
    each = operations_per_token(x.erase, form, C, K, V, T, readers if causal else 0)
    total = each * prod(x.v.shape[:-1])
    if causal or q is None:
        return each, total
    return each, total + 2 * K * V * prod(q.shape[:-2]) * readers * H  # write everything, then read


def operations_per_token(erase: Erase, form: str, C: int, K: int, V: int, T: int, queries: int = 1) -> float:
    """Operations of the products of the forward pass per token and state (an m x n x p product counts 2 m n p).

    Readers are the queries and, if the variant erases, one erase vector; writers are k and, if FREE, b.
    """
    erasers, writers = {Erase.NONE: (0, 1), Erase.DELTA: (1, 1), Erase.FREE: (1, 2)}[erase]
    readers = queries + erasers
    if form == "recurrent form":
        return 2 * (readers + writers) * K * V
    applied = queries * writers + max(erasers * writers - 1, 0)  # gram matrices that multiply values
    inside = readers * writers * 2 * C * K + applied * 2 * C * V + erasers * (C - 1) * V
    if form == "chunk form":
        return inside + 2 * (readers + writers) * K * V if readers else 2 * writers * K * V
    earlier = max(T - C, 0) / 2  # tokens of earlier tiles, on average
    return inside + readers * writers * earlier * 2 * (K + V)


def stored(state: Any) -> dict[str, str]:
    """The arrays of a state that are stored in 16 bits, with their dtypes."""
    each = {name: dtype_name(S) for name, S in flatten("state", state).items() if S is not None}
    return {name: kind for name, kind in each.items() if kind in NARROW}


WIDTH = {"float64": 8, "float32": 4}  # bytes per element; 2 for other dtypes


def _bytes(x: Any) -> int:
    if isinstance(x, tuple):
        return sum(map(_bytes, x))
    return prod(x.shape) * WIDTH.get(dtype_name(x), 2)
