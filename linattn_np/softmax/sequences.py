"""Backends of array calls, one sequence after the other: a module's forward and backward on heads before tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..runtime.arrays import Array, cast, device
from ..runtime.shapes import Sequence
from . import heads
from .types import Inputs, Parts, Past, SoftmaxPlan

Row = Any  # the cache of one sequence, None without


def each_sequence(plan: SoftmaxPlan, x: Inputs, state: Any) -> Iterator[tuple[Sequence, Inputs, Row]]:
    """(sequence, its tokens, its cache)."""
    for s in plan.sequences:
        yield s, heads.tokens_of(x, s), heads.row_of(plan, x, state, s)


def forward(module: Any, plan: SoftmaxPlan, x: Inputs, state: Any) -> tuple[Array, list[Array | None]]:
    """(out (..., Tq, heads, V), the logs of the sums of each sequence)."""
    outs, logs = [], list[Any]()
    for _, own, row in each_sequence(plan, x, state):
        out, log = None, None
        if 0 not in own.q.shape[:-1]:
            out, log = module.forward(plan, heads.parts_of(plan, own, row))
            outs.append(heads.join(plan.xp, out, out_shape(own)))
        logs.append(log)
    if not outs:
        return plan.xp.zeros(out_shape(x), dtype=plan.dtype, device=device(x.v)), logs
    return outs[0] if len(outs) == 1 else plan.xp.concat(outs, axis=-3), logs


def backward(
    module: Any, plan: SoftmaxPlan, x: Inputs, state: Any, results: tuple[Array, Any], dout: Array,
    dlse: Array | None = None,
) -> tuple[Inputs, Any]:  # fmt: skip
    """(gradients of the inputs, of the cache); results: out and the logs."""
    found, (out, logs) = [], results
    for log, (s, own, row) in zip(logs, each_sequence(plan, x, state), strict=True):
        if log is None:
            found.append(zeros(plan, own, row))
            continue
        place = slice(None) if s.row is None else slice(s.start, s.stop)
        o, d, more = (None if y is None else heads.split(plan.xp, cast(plan.xp, y[..., place, :, :], plan.dtype),
                                                         heads.groups(x)) for y in (out, dout, dlse))  # fmt: skip
        given = () if more is None else (more,)
        found.append(joined(plan, own, row, module.backward(plan, heads.parts_of(plan, own, row), o, log, d, *given)))
    return gathered(plan, x, found)


def out_shape(x: Inputs) -> tuple[int, ...]:
    """(..., Tq, max(Hq, H), V)"""
    return *x.q.shape[:-2], max(x.q.shape[-2], x.v.shape[-2]), x.v.shape[-1]


def zeros(plan: SoftmaxPlan, x: Inputs, row: Row) -> tuple[Inputs, Row]:
    """Gradients that are 0."""
    xp, where = plan.xp, device(x.v)
    dx = Inputs(*(None if y is None else xp.zeros(y.shape, dtype=plan.dtype, device=where) for y in x))
    return dx, None if row is None else type(row)(*(xp.zeros(y.shape, dtype=plan.dtype, device=where) for y in row))


def joined_rows(plan: SoftmaxPlan, rows: list[Row]) -> Any:
    """Caches of the sequences as one: a row for each of a ragged batch."""
    if not plan.is_ragged:
        return rows[0]
    lead = rows[0].length.ndim
    each = zip(*([plan.xp.reshape(y, y.shape[lead:]) for y in row] for row in rows), strict=True)
    return type(rows[0])(*map(plan.xp.stack, map(list, each)))


def joined(plan: SoftmaxPlan, x: Inputs, row: Row, d: Parts) -> tuple[Inputs, Row]:
    """Gradients of a sequence and of its cache, in their shapes."""
    xp = plan.xp
    q, k, v = (heads.join(xp, y, given.shape) for y, given in ((d.q, x.q), (d.k, x.k), (d.v, x.v)))
    g, beta = (None if given is None else heads.join(xp, y[..., None], (*given.shape, 1))[..., 0]
               for y, given in ((d.g, x.g), (d.beta, x.beta)))  # fmt: skip
    sinks = None if x.sinks is None else xp.reshape(d.sinks, x.sinks.shape)
    w, bias = (None if given is None else heads.join(xp, y, given.shape) for y, given in ((d.w, x.w), (d.bias, x.bias)))
    dx = Inputs(q, k, v, g, sinks, w, beta, bias)
    if row is None or d.past is None:
        return dx, zeros(plan, x, row)[1]
    past: Past = d.past
    each = {"k": heads.join(xp, past.k, row.k.shape), "v": heads.join(xp, past.v, row.v.shape),
            "length": xp.zeros_like(row.length)}  # fmt: skip
    if past.b is not None:
        each["b"] = heads.join(xp, past.b[..., None], (*row.b.shape, 1))[..., 0]
    return dx, type(row)(**each)


def gathered(plan: SoftmaxPlan, x: Inputs, found: list[tuple[Inputs, Row]]) -> tuple[Inputs, Any]:
    """Gradients of all sequences in the shapes of the inputs."""
    xp = plan.xp

    def whole(name: str) -> Any:
        parts = [getattr(dx, name) for dx, _ in found]
        if getattr(x, name) is None:
            return None
        if name == "sinks":
            return sum(parts[1:], parts[0])
        return parts[0] if len(parts) == 1 else xp.concat(parts, axis=-2 if name in ("g", "beta") else -3)

    rows = [row for _, row in found]
    return Inputs(*map(whole, Inputs._fields)), None if rows[0] is None else joined_rows(plan, rows)
