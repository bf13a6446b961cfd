"""The softmax core: the functions of the protocol `linattn_np/core.py:Core`.

    out_i = sum_j p_ij v_j,   p_ij ~ e^{scale q_i . k_j + sum_{j < s <= i} g_s}

The state is a cache of keys and values (types.py): it grows with the tokens, or keeps its slots with overwrite_state.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import prod
from typing import Any

from ..core import CallPlan, Computed, Core, Explained, register, register_states
from ..runtime.arrays import Array, cast, device
from ..runtime.shapes import Sizes
from . import cache, definition, heads, policy
from .array import tiles
from .types import GatedCache, Inputs, KeyValueCache, Parts, Past, Plan, Residuals

MODULES = {"reference": definition, "chunks": tiles}


class Softmax(Core):
    """Attention over all tokens."""

    BACKENDS = ("reference", "chunks")
    STATE_AXES = {"k": "L Hk K", "v": "L H V", "b": "L Hq", "length": ""}  # noqa: RUF012

    def plan(self, plan: CallPlan, spec: Any, options: Mapping[str, Any], sizes: Sizes) -> Plan:
        """The plan of a call, with window and normalize."""
        own = {"window": options.get("window"), "normalize": options.get("normalize", True)}
        return Plan(**plan._asdict() | own)

    def forward(self, fn: str, x: Inputs, plan: Plan, state: Any, wanted: str | None) -> Computed:
        """(out, final state, residuals)."""
        backend = choose(plan, wanted)
        end = final_state(plan, x, state) if plan.returns_state or plan.gradients or x.q is None else None
        if x.q is None:
            return None, end, Residuals(x, plan, backend, state, None, None)
        module, outs, logs = MODULES[backend], [], []
        for s, own, row in each_sequence(plan, x, state):
            if 0 in own.q.shape[:-1]:
                outs.append(None)
                logs.append(None)
                continue
            out, log = module.forward(plan, heads.parts_of(plan, own, row))
            outs.append(heads.join(plan.xp, out, out_shape(own)))
            logs.append(log)
        out = joined(plan, x, outs)
        return out, end, Residuals(x, plan, backend, state, out, logs)

    def backward(self, residuals: Residuals, dout: Array | None, dstate: Any) -> tuple[Any, Any]:
        """Gradients of the inputs and of the initial state."""
        x, plan, backend, state, out, logs = residuals
        found = []
        for n, (s, own, row) in enumerate(each_sequence(plan, x, state)):
            dx, dcache = zeros(plan, own), None if row is None else type(row)(*map(plan.xp.zeros_like, row))
            if dout is not None and logs[n] is not None:
                place = slice(s.start, s.stop) if s.row is not None else slice(None)
                given = [heads.split(plan.xp, cast(plan.xp, y[..., place, :, :], plan.dtype), heads.groups(x))
                         for y in (out, dout)]  # fmt: skip
                d = MODULES[backend].backward(plan, heads.parts_of(plan, own, row), given[0], logs[n], given[1])
                dx, dcache = joined_gradients(plan, own, row, d)
            if dstate is not None:
                dx, dcache = with_state(plan, own, row, heads.row_of(plan, x, dstate, s), (dx, dcache))
            found.append((dx, dcache))
        return gathered(plan, x, found)

    def reads_out(self, residuals: Residuals) -> bool:
        """Backward reads the output."""
        return residuals.plan.normalize

    def explain(self, fn: str, x: Inputs, plan: Plan, wanted: str | None) -> Explained:
        """2 (K + V) operations for each pair of a query and a key."""
        K, V, H = x.k.shape[-1], x.v.shape[-1], max(x.v.shape[-2], x.k.shape[-2] if x.q is None else x.q.shape[-2])
        backend, pairs, tokens = choose(plan, wanted), 0, 0
        for s in plan.sequences:
            T = s.stop - s.start
            Tq = 0 if x.q is None else T if plan.causal or s.row is not None else x.q.shape[-3]
            W = T if plan.window is None else min(T, plan.window)
            pairs += W * (W + 1) // 2 + (T - W) * W if plan.causal and Tq else Tq * T
            tokens += T
        total = 2.0 * (K + V) * pairs * prod(x.v.shape[:-3]) * H
        others = {name: unsupported_reason(plan, name) or "covers the call too" for name in self.BACKENDS}
        del others[backend]
        reason = "requested" if wanted else "the default path"
        reason += f"; from T = {crossover(K, V)} on more operations than linear attention's 4 K V a token"
        one = backend == "reference"
        return Explained(backend, reason, others, "recurrent form" if one else "tiles",
                         None if one else policy.array_tile(plan.chunk_size), total,
                         total / max(tokens * prod(x.v.shape[:-3]) * H, 1))  # fmt: skip


def crossover(K: int, V: int) -> int:
    """The T from which 2 (K + V) (T + 1) / 2 operations a token are more than the 4 K V of a state (K, V)."""
    return 4 * K * V // (K + V) if K + V else 0


def unsupported_reason(plan: Plan, backend: str) -> str | None:
    """Why a backend does not compute a call; None if it does."""
    if backend == "reference" and plan.chunk_size == "parallel":
        return "the definition goes token by token; chunk_size='parallel' needs tiles"
    return None


@functools.cache
def _word(backend: str, reason: str) -> str:
    return f"backend {backend!r} does not cover this call: {reason}"


def choose(plan: Plan, wanted: str | None) -> str:
    """The backend of a call.   Raises ValueError if the one that is wanted does not compute it."""
    if wanted is not None:
        if (reason := unsupported_reason(plan, wanted)) is not None:
            raise ValueError(_word(wanted, reason))
        return "reference" if plan.chunk_size == 1 else wanted
    return "reference" if plan.chunk_size == 1 else "chunks"


# sequences


def each_sequence(plan: Plan, x: Inputs, state: Any) -> Any:
    """(sequence, its tokens, its cache)."""
    for s in plan.sequences:
        yield s, heads.tokens_of(x, s), heads.row_of(plan, x, state, s)


def final_state(plan: Plan, x: Inputs, state: Any) -> Any:
    """The cache after all tokens; a row for each sequence of a ragged batch."""
    L, ends = cache.slots_after(plan, state, x.v.shape[-3]), []
    for _, own, row in each_sequence(plan, x, state):
        ends.append(cache.after(plan, own, cache.empty(plan.xp, own, plan.dtype) if row is None else row, L))
    return joined_rows(plan, ends)


def joined_rows(plan: Plan, rows: list[Any]) -> Any:
    """Caches of the sequences as one."""
    if not plan.is_ragged:
        return rows[0]
    lead = rows[0].length.ndim
    each = zip(*([plan.xp.reshape(y, y.shape[lead:]) for y in row] for row in rows), strict=True)
    return type(rows[0])(*map(plan.xp.stack, each))


def out_shape(x: Inputs) -> tuple[int, ...]:
    """(..., Tq, max(Hq, H), V)"""
    return *x.q.shape[:-2], max(x.q.shape[-2], x.v.shape[-2]), x.v.shape[-1]


def joined(plan: Plan, x: Inputs, outs: list[Array | None]) -> Array:
    """The outputs of all sequences."""
    found = [out for out in outs if out is not None]
    if not found:
        return plan.xp.zeros(out_shape(x), dtype=plan.dtype, device=device(x.v))
    return found[0] if len(found) == 1 else plan.xp.concat(found, axis=-3)


# gradients


def zeros(plan: Plan, x: Inputs) -> Inputs:
    """Gradients that are 0."""
    return Inputs(*(None if y is None else plan.xp.zeros(y.shape, dtype=plan.dtype, device=device(x.v)) for y in x))


def joined_gradients(plan: Plan, x: Inputs, row: Any, d: Parts) -> tuple[Inputs, Any]:
    """Gradients of a sequence and of its cache, in their shapes."""
    xp = plan.xp
    q, k, v = (heads.join(xp, y, given.shape) for y, given in ((d.q, x.q), (d.k, x.k), (d.v, x.v)))
    g = None if x.g is None else heads.join(xp, d.g[..., None], (*x.g.shape, 1))[..., 0]
    sinks = None if x.sinks is None else xp.reshape(d.sinks, x.sinks.shape)
    if row is None:
        return Inputs(q, k, v, g, sinks), None
    past = d.past or Past(*(None,) * 4)
    if past.k is None:
        return Inputs(q, k, v, g, sinks), type(row)(*map(xp.zeros_like, row))
    each = {"k": heads.join(xp, past.k, row.k.shape), "v": heads.join(xp, past.v, row.v.shape),
            "length": xp.zeros_like(row.length)}  # fmt: skip
    if past.b is not None:
        each["b"] = heads.join(xp, past.b[..., None], (*row.b.shape, 1))[..., 0]
    return Inputs(q, k, v, g, sinks), type(row)(**each)


def with_state(plan: Plan, x: Inputs, row: Any, dend: Any, found: tuple[Inputs, Any]) -> tuple[Inputs, Any]:
    """Gradients with those that come through the final state."""
    (dx, dcache), begin = found, cache.empty(plan.xp, x, plan.dtype) if row is None else row
    more, dbegin = cache.after_vjp(plan, x, begin, dend)
    dx = Inputs(*(y if z is None else y + z for y, z in zip(dx, more, strict=True)))
    return dx, None if row is None else type(row)(*(y + z for y, z in zip(dcache, dbegin, strict=True)))


def gathered(plan: Plan, x: Inputs, found: list[tuple[Inputs, Any]]) -> tuple[Inputs, Any]:
    """Gradients of all sequences in the shapes of the inputs."""
    xp = plan.xp

    def tokens(name: str) -> Any:
        parts = [getattr(dx, name) for dx, _ in found]
        if getattr(x, name) is None:
            return None
        if name == "sinks":
            return functools.reduce(lambda a, b: a + b, parts)
        return parts[0] if len(parts) == 1 else xp.concat(parts, axis=-2 if name == "g" else -3)

    rows = [row for _, row in found]
    return Inputs(*map(tokens, Inputs._fields)), None if rows[0] is None else joined_rows(plan, rows)


CORE = Softmax()
register(CORE, Inputs)
register_states(CORE, KeyValueCache, GatedCache)
