"""explain: the backend of a call and why, its form, its operations and bytes by formula."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..runtime.arrays import NARROW, dtype_name
from . import replay
from .binding import Prepared, flatten, prepare, spec_of
from .dispatch import core_of, is_in_part
from .foreign import bridge_of, lazy_bridge
from .pieces import cut, with_all_queries

IN_PART = "replayed in part: the array calls around the core are made by every call"


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
    replay: str  # "replayed", IN_PART and why if an earlier call shows it, or why a repeated call is computed in full
    arrays: str = ""  # how arrays of another framework are seen, and who differentiates the call

    def __str__(self) -> str:
        lines = [
            f"{self.function}: backend {self.backend} ({self.reason})",
            *(f"  not {name}: {why}" for name, why in self.others.items()),
            f"  {self.form}" + (f", chunks of {self.chunk_size}" if self.chunk_size else "")
            + f", computed in {self.compute_dtype}",
            *([f"  {self.arrays}"] if self.arrays else []),
            f"  {self.operations:,} operations ({self.operations_per_token:,.0f} a token and state)",
            f"  {self.bytes:,} bytes in and out",
            "  repeated calls are " + (self.replay if self.replay.startswith("replayed") else
                                       f"computed in full: {self.replay}"),
        ]
        return "\n".join(lines)


def explain(fn: Callable[..., Any], *arrays: Any, **options: Any) -> Explanation:
    """Which backend a call takes and why, its form, and its operations and bytes by the formulas."""
    spec = spec_of("explain", fn)
    if (bridge := bridge_of(arrays, options)) is not None:
        seen = bridge.explain(spec.name, functools.partial(explain, fn), arrays, options)
        if seen is not NotImplemented:
            return replace(seen[0], arrays=seen[1])
    if (bridge := lazy_bridge(arrays, options)) is not None and (block := bridge.explain(spec, arrays, options)):
        return replace(block, reason=f"of each block of dask's arrays: {block.reason}", replay="the arrays are of dask")
    call = prepare(spec, arrays, options)
    x = with_all_queries(call).inputs()
    core = core_of(x)
    found = core.explain(spec.name, x, call.plan, call.options["backend"])
    reason = found.reason + "".join(f"; {name} is stored in {kind}" for name, kind in stored(call.given_state).items())
    if call.options["reverse"]:
        reason += "; on tokens in reverse order"
    if call.is_cut or call.lacks_states(core, x):
        reason += f"; in {len(cut(call)[0])} pieces"
    elif call.plan.states_at is not None:
        reason += f"; the pass stores {len(call.plan.states_at)} states"
    moved = sum(_bytes(x) for n in spec.arrays if (x := getattr(call.variables, n)) is not None)
    moved += sum(_bytes(S) for S in (call.state if isinstance(call.state, tuple) else [call.state]) if S is not None)
    return Explanation(
        spec.name, found.backend, reason, found.others, found.form, found.chunk_size,
        dtype_name(call.plan.xp.empty(0, dtype=call.plan.dtype)), round(found.operations), found.operations_per_token,
        moved + _bytes_of_out(call), _replay(call, arrays, options),
    )


def _replay(call: Prepared, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> str:
    """"replayed", or why not."""
    options = call.options
    if not replay.ENABLED:
        return "LINATTN_REPLAY is 0"
    if call.library.name not in ("numpy", "cupy"):
        return f"the arrays are of {call.library.name}"
    if options["cu_seqlens"] is not None:
        return "the batch is ragged"
    if options["return_states_at"] is not None and options["overwrite_state"]:
        return "states at positions are returned"
    if call.options["check"]:
        return "check=True looks at the numbers"
    if call.doubtful_layout:
        return "the layout raises a warning"
    if call.gathers_rows:
        return "the rows of the pool are gathered first"
    signature = replay.signature(call.spec, arrays, keywords)
    if signature is None and options["state_rows"] is not None:
        return "there are many row numbers in host memory"
    if signature is None:
        return "an option is neither None, bool, int, float, str nor a tuple of these, or an array is on another device"
    if call.recorder is None and replay.names_of(call.spec, signature, arrays, keywords) is None:
        return "an option is an array, or the bytes of an array are swapped"
    if not replay.has_distinct_arrays(signature):
        return "two arrays begin at one address"
    recorded = replay.plans.get(signature[0])
    if isinstance(recorded, replay.Recorded) and is_in_part(recorded):
        return f"{IN_PART} ({recorded.reason})" if recorded.reason else IN_PART
    if isinstance(recorded, replay.Recorded) and recorded.plan is replay.computed_in_full:
        return "what it computes cannot be recorded"
    return "replayed"


def _bytes_of_out(call: Prepared) -> int:
    """Bytes of the output: one for every query, or for every value where the variant has no queries."""
    change, c = call.spec.change, call.variables
    v = getattr(c, change.value)
    if change.query is None:
        return _bytes(v)
    if (queries := getattr(c, change.query)) is None:
        return 0
    heads = max(v.shape[-2], queries.shape[-2])
    return prod(queries.shape[:-2]) * heads * v.shape[-1] * WIDTH.get(dtype_name(v), 2)


def stored(state: Any) -> dict[str, str]:
    """The arrays of a state that are stored in 16 bits, with their dtypes."""
    each = {name: dtype_name(S) for name, S in flatten("state", state).items() if S is not None}
    return {name: kind for name, kind in each.items() if kind in NARROW}


WIDTH = {"float64": 8, "float32": 4}  # bytes per element; 2 for other dtypes


def _bytes(x: Any) -> int:
    if isinstance(x, tuple):
        return sum(map(_bytes, x))
    return prod(x.shape) * WIDTH.get(dtype_name(x), 2)
