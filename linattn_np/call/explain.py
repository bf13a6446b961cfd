"""explain: the backend of a call and why, its form, its operations and bytes by formula."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from typing import Any

from ..runtime.arrays import NARROW, STORAGE, dtype_name
from ..runtime.shapes import flatten
from ..spec import Call, VariantSpec
from . import head_parts
from .binding import gathers_rows, inputs_of, is_cut, is_doubtful, lacks_states, prepare, spec_of
from .dispatch import core_of
from .foreign import bridge_of, lazy_bridge
from .parts import parts_of
from .pieces import cut, with_all_queries
from .replay import plans
from .replay.plans import has_distinct_arrays, names_of, signature_of

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
    replay: str  # as an earlier call shows: "replayed", or IN_PART and why; or why repeated calls are computed in full
    arrays: str = ""  # how arrays of another framework are seen, and who differentiates the call
    slow: str = ""  # on a slow path: why, and what would make the call fast; "" on a fast one

    def __str__(self) -> str:
        lines = [
            f"{self.function}: backend {self.backend} ({self.reason})",
            *(f"  not {name}: {why}" for name, why in self.others.items()),
            f"  {self.form}"
            + (f", chunks of {self.chunk_size}" if self.chunk_size else "")
            + f", computed in {self.compute_dtype}",
            *([f"  {self.arrays}"] if self.arrays else []),
            *([f"  slow path: {self.slow}"] if self.slow else []),
            f"  {self.operations:,} operations ({self.operations_per_token:,.0f} a token and state)",
            f"  {self.bytes:,} bytes in and out",
            "  repeated calls are "
            + (self.replay if self.replay.startswith("replayed") else f"computed in full: {self.replay}"),
        ]
        return "\n".join(lines)


def explain(fn: Callable[..., Any], *arrays: Any, **options: Any) -> Explanation:
    """Which backend a call takes and why, its form, and its operations and bytes by the formulas.

    `slow` says that it makes array calls instead of compiled loops or CUDA kernels, takes kernels of float32 for rows
    of two dtypes, goes token by token on a GPU, or has gradients by array calls, and what would be fast; "" if it is.
    Of adaptive filters (la.rls and others) it explains the call of the core, which has one token more.
    """
    if (rule := getattr(fn, "explain", None)) is not None:
        return rule(arrays, options)
    return explain_call(spec_of("explain", fn), arrays, options)


def explain_call(spec: VariantSpec, arrays: tuple[Any, ...], options: dict[str, Any]) -> Explanation:
    """The explanation of a variant's call."""
    if (bridge := bridge_of(arrays, options)) is not None:
        of_views = functools.partial(_of_views, spec)
        seen = bridge.explain(spec.name, of_views, arrays, options)
        if seen is not NotImplemented:
            return replace(seen[0], arrays=seen[1])
    if (bridge := lazy_bridge(arrays, options)) is not None and (block := bridge.explain(spec, arrays, options)):
        return replace(block, reason=f"of each block of dask's arrays: {block.reason}", replay="the arrays are of dask")
    call = prepare(spec, arrays, options)
    x = inputs_of(with_all_queries(call))
    core = core_of(x)
    found = core.explain(spec.name, x, call.plan, call.options["backend"])
    slow = _slow(call, core, x, found)
    reason = found.reason + "".join(f"; {name} is stored in {kind}" for name, kind in stored(call.given_state).items())
    if call.options["reverse"]:
        reason += "; on tokens in reverse order"
    if is_cut(call) or lacks_states(call, core, x):
        reason += f"; in {len(cut(call)[0])} pieces"
    elif call.plan.states_at is not None:
        reason += f"; the pass stores {len(call.plan.states_at)} states"
    elif len(own := parts_of(call)) > 1:
        reason += f"; {len(own)} parts of the tokens in turn"
    elif len(of_heads := head_parts.parts_of(call)) > 1:
        reason += f"; {len(of_heads)} parts of the heads in turn"
    moved = sum(_bytes(x) for n in spec.arrays if (x := getattr(call, n)) is not None)
    moved += sum(
        _bytes(S) for S in (call.initial if isinstance(call.initial, tuple) else [call.initial]) if S is not None
    )
    return Explanation(
        spec.name,
        found.backend,
        reason,
        found.others,
        found.form,
        found.chunk_size,
        dtype_name(call.xp.empty(0, dtype=call.dtype)),
        round(found.operations),
        found.operations_per_token,
        moved + _bytes_of_out(call),
        _replay(call, arrays, options),
        slow=slow,
    )


def _of_views(spec: VariantSpec, *arrays: Any, **options: Any) -> Explanation:
    return explain_call(spec, arrays, options)


FAST = {"numpy": ("numba", "compiled loops"), "cupy": ("cuda", "CUDA kernels")}  # by library


def _slow(call: Call, core: Any, x: Any, found: Any) -> str:
    """Why a call is on a slow path, and what would make it fast; "" for others."""
    name = call.library.name
    if name not in FAST:
        return f"array calls of {name}: NumPy arrays take compiled loops, CuPy arrays CUDA kernels"
    backend, words = FAST[name]
    if found.backend != backend:
        why = found.others.get(backend, "")
        if why == COVERED and call.options["backend"] is None:
            return ""  # products of the library are the fast path
        why = "as requested" if why == COVERED else why
        return f"array calls instead of {words}: {why}; {_remedy(call, core, x, backend)}"
    kinds = {dtype_name(y): n for n in ("q", "k", "v") if (y := getattr(call, n, None)) is not None}
    gradients = f"gradients by array calls: {found.gradients}" if found.gradients else ""
    if not _is_fast(call, found, backend):
        words = f"token by token instead of chunks, {gradients}" if gradients else "token by token instead of chunks"
        return f"{words}; {_remedy(call, core, x, backend)}"
    if backend == "cuda" and len(kinds) > 1 and set(kinds) & set(NARROW):
        each = ", ".join(f"{n} is {kind}" for kind, n in kinds.items())
        return f"kernels of float32, since {each}; fast with q, k and v of one dtype of 16 bits"
    return f"{gradients}; {NO_REMEDY}" if gradients else ""


COVERED = "covers the call too"
NO_REMEDY = "no dtype, width or option changes it"
SHORT = 16  # tokens that go one after the other in any case


def _is_fast(call: Call, found: Any, backend: str) -> bool:
    """Whether a call takes compiled code, on a GPU in chunks if there are many tokens and nothing else is asked for."""
    longest = max((s.stop - s.start for s in call.sequences), default=0)
    in_chunks = found.form != "recurrent form" or longest <= SHORT or call.options["chunk_size"] == 1
    if found.backend != backend:
        return found.others.get(backend) == COVERED  # products of the library are the fast path
    return in_chunks or backend != "cuda"


def _remedy(call: Call, core: Any, x: Any, backend: str) -> str:
    """What makes the call fast, found by asking the core again: options, a dtype, widths."""
    plan, wanted, xp = call.plan, call.options["backend"], call.xp
    without = [n for n in ("backend", "chunk_size") if call.options[n] is not None]
    plain = plan._replace(chunk_size=None)
    tries = [("without " + " and ".join(without), x, plain)] if without else []
    change = call.spec.change
    rows = ", ".join(dict.fromkeys(filter(None, (change.query, change.key, change.value))))
    for kind, dtype in (("float32 arrays", xp.float32), (f"bfloat16 {rows}", _bfloat16())):
        for widest in (None, 256, 128) if dtype is not None else ():
            words = f"with {kind}" + (f" of up to {widest} channels" if widest else "")
            tries.append((words, _like(xp, x, dtype, widest), plain._replace(dtype=xp.float32)))
    for words, other, its_plan in tries:
        try:
            found = core.explain(call.name, other, its_plan, None)
        except (ValueError, TypeError):
            continue
        if _is_fast(call, found, backend):
            also = "" if words.startswith("without") or not without else f", without {' and '.join(without)}"
            return f"fast {words}{also}"
    return NO_REMEDY if wanted is None else f"{NO_REMEDY} but backend"


def _like(xp: Any, x: Any, dtype: Any, widest: int | None = None) -> Any:
    """Inputs of a core with q, k and v in another dtype, of no more channels than so many: one number, broadcast."""

    def other(name: str, y: Any) -> Any:
        if not hasattr(y, "shape") or dtype_name(y) not in STORAGE:
            return y
        shape = tuple(y.shape) if widest is None or y.ndim < 2 else (*y.shape[:-1], min(y.shape[-1], widest))
        kind = dtype if name in ("q", "k", "v") else xp.float32 if dtype_name(y) == "float64" else y.dtype
        return xp.broadcast_to(xp.zeros((1,) * y.ndim, dtype=kind), shape)

    return x._replace(**{n: other(n, y) for n, y in x._asdict().items()})


def _bfloat16() -> Any:
    """The dtype bfloat16, if there is one."""
    if find_spec("ml_dtypes") is None:
        return None
    from ml_dtypes import bfloat16

    return bfloat16


def _replay(call: Call, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> str:
    """How repeated calls are computed."""
    options = call.options
    if not plans.ENABLED:
        return "LINATTN_REPLAY is 0"
    if call.library.name not in ("numpy", "cupy"):
        return f"the arrays are of {call.library.name}"
    if options["cu_seqlens"] is not None:
        return "the batch is ragged"
    if options["return_states_at"] is not None and options["overwrite_state"]:
        return "states at positions are returned"
    if call.options["check"]:
        return "check=True looks at the numbers"
    if is_doubtful(call):
        return "the layout raises a warning"
    if gathers_rows(call):
        return "the rows of the pool are gathered first"
    if len(parts_of(call)) > 1:
        return "it is large: some tokens are computed at a time"
    if len(head_parts.parts_of(call)) > 1:
        return "it is large: some heads are computed at a time"
    signature = signature_of(call.spec, arrays, keywords)
    if signature is None and options["state_rows"] is not None:
        return "there are many row numbers in host memory"
    if signature is None:
        return "an option is neither None, bool, int, float, str nor a tuple of these, or an array is on another device"
    if call.library.name == "numpy" and names_of(call.spec, signature, arrays, keywords) is None:
        return "an option is an array, or the bytes of an array are swapped"
    if not has_distinct_arrays(signature):
        return "two arrays begin at one address"
    return plans.described(signature[0], IN_PART)


def _bytes_of_out(call: Call) -> int:
    """Bytes of the output: one for every query, or for every value where the variant has no queries."""
    change = call.spec.change
    v = getattr(call, change.value)
    if change.query is None:
        return _bytes(v)
    if (queries := getattr(call, change.query)) is None:
        return 0
    heads = max(v.shape[-2], queries.shape[-2])
    return prod(queries.shape[:-2]) * heads * v.shape[-1] * WIDTH.get(dtype_name(v), 2)


def stored(state: Any) -> dict[str, str]:
    """The arrays of a state that are stored in 16 bits, with their dtypes."""
    each = {name: dtype_name(S) for name, S in flatten("state", state).items() if S is not None}
    return {name: kind for name, kind in each.items() if kind in NARROW}


WIDTH = {"float64": 8, "float32": 4, "complex128": 16, "complex64": 8, "int64": 8, "uint64": 8, "int32": 4,
         "uint32": 4, "int8": 1, "uint8": 1}  # bytes per element; 2 for other dtypes  # fmt: skip


def _bytes(x: Any) -> int:
    if isinstance(x, tuple):
        return sum(map(_bytes, x))
    return prod(x.shape) * WIDTH.get(dtype_name(x), 2)
