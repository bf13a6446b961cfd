"""Spans of CuPy arrays: levels above c = 6 as heads of one call of the core, those below in chunks of 64 positions.

    near   A = the core's output for v = I, chunk by chunk;  out = (A (.) Lam) v, a call without decay whose queries are
           the rows of A (.) Lam and whose keys are those of I; sequences of one length with zeros up to a whole chunk
    far    head (h, l) has k_h and q_h, the values of h in first halves of blocks of 2^l positions, 0 in second ones,
           and the decay of h, but -inf where a block begins: y_t[l] = scale q_t S_t^(l) in second halves
           out += sum over l of lam_t[l] y_t[l]

ops/levels.py makes the arrays. Arrays keep their dtypes. Without erase and states, and with warpgroup products, passes
of their own (cuda/scan/levels.py) skip what is 0: their values are those of h, and they reset S themselves.
dlam_t[l] = <dout_t, y_t[l]>, and the cotangent of y_t[l] is
lam_t[l] dout_t: all other gradients are the core's. The low levels of states are those of ends.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ....ops.levels import CHUNK, LevelHeads, gather, resized, spread, weigh, weigh_vjp
from ....ops.sums import added
from ....runtime.arrays import Array, cast, device, is_cupy
from ....runtime.constants import constant_array
from ....runtime.recorder import refuse
from ....runtime.shapes import Sequence
from ... import core, policy
from ...types import Inputs, Plan
from . import ends
from .blocks import Span, bit, blocks, positions, tails_of
from .far import mixed
from .rows import Gradients, LevelInputs, Row, of_groups
from .sums import last_near

NEAR = 6  # the last level inside a chunk


class Near(NamedTuple):
    """Residuals of the near levels: their row, A (tokens, H, 64), those of the core for A and for the product."""

    row: Row
    A: Any
    of_A: Any
    product: Any


class Far(NamedTuple):
    """Residuals of some far levels: y (tokens, H count, V), those of the core; None of passes of their own."""

    at: LevelHeads
    y: Any
    core: Any


class Saved(NamedTuple):
    """Residuals; has_ends: whether the final state was computed."""

    row: Row
    near: Any
    far: list[Far]
    head: Any
    tail: Any
    has_ends: bool


def takes(fn: str, x: LevelInputs, plan: Plan, wanted: str | None) -> bool:
    """Whether a call goes so: where CUDA kernels compute it."""
    if not is_cupy(plan.xp) or plan.chunk_size not in (None, CHUNK) or 0 in (*x.v.shape, *x.k.shape, *x.lam.shape):
        return False
    if max(s.stop - s.start for s in plan.sequences) <= policy.SHORT_ARRAY or plan.dtype != plan.xp.float32:
        return False
    is_wide = max(x.k.shape[-1], x.v.shape[-1]) > policy.WIDEST_CUDA
    return not is_wide and core.choose(fn, x.core, plan, wanted) is core.CUDA


def passes() -> Any:
    """The module of passes that skip what is 0."""
    from ...cuda.scan import levels

    return levels


def forward(row: Row) -> tuple[Any, Array, Saved]:
    """(out or None, final S, residuals)."""
    return _forward(row, row.plan.returns_state or row.x.q is None)


def _forward(row: Row, has_ends: bool) -> tuple[Any, Array, Saved]:
    xp, c, (N, H, n, K, V) = row.plan.xp, last_near(row), row.state_shape
    out, near, of_head, of_tail, low = None, None, None, None, None
    if row.x.q is not None:
        out, near = _near(_in_chunks(row))
        out = _moved(near.row, row, {"out": out})["out"]
    parts, S = list[Far](), list[Array]()
    for at in _levels(row, has_ends):
        out, end, saved = _far(row, at, out, has_ends)
        parts.append(saved)
        S.append(end)
    if row.S is not None:
        y, low, of_head = ends.head(_wide(row), c)
        out = out if y is None or out is None else cast(xp, cast(xp, out, row.plan.dtype) + y, out.dtype)
    if not has_ends:  # of which the shape alone is read
        zero = constant_array(xp, ("level", str(row.plan.dtype)), device(row.x.v), lambda: row.zeros(()))
        return out, xp.broadcast_to(zero, row.state_shape), Saved(row, near, parts, of_head, None, False)
    if any(s.stop > s.start for s in tails_of(row.spans, 1 << c)):
        own, of_tail = ends.tail(_wide(row), c)
        low = own if low is None else low + own
    S = [row.zeros((N, H, c, K, V)) if low is None else low, *S]
    S.append(row.zeros((N, H, n - sum(y.shape[2] for y in S), K, V)))
    return out, xp.concat(S, axis=2), Saved(row, near, parts, of_head, of_tail, True)


def backward(saved: Saved, dout: Any, dS: Any) -> Gradients:
    """Gradients of the row's arrays."""
    if dS is not None and not saved.has_ends:
        saved = _forward(saved.row, True)[2]
    row, near, parts, of_head, of_tail, _ = saved
    xp, c, d = row.plan.xp, last_near(row), Gradients()
    if near is not None and dout is not None:
        own = Gradients()
        _near_vjp(near, _moved(row, near.row, {"dout": dout})["dout"], own)
        lam = own.pop("lam")  # apart: where later levels are added in place it may be a gradient of the call
        d.update(_moved(near.row, row, {"lam": lam}) | _moved(near.row, row, own))
    for part in parts:
        _far_vjp(row, part, dout, None if dS is None else dS[:, :, part.at.first - 1 :, ...], d)
    low, more = None if dS is None else dS[:, :, :c, ...], Gradients()
    if of_head is not None:
        ends.head_vjp(_wide(row), c, of_head, None if dout is None else cast(xp, dout, row.plan.dtype), low, more)
    if of_tail is not None and low is not None:
        ends.tail_vjp(_wide(row), c, of_tail, low, more)
    for name, y in more.items():
        d[name] = y if name not in d else cast(xp, d[name], row.plan.dtype) + y
    return d


def _wide(row: Row) -> Row:
    """The row with values in the compute dtype, for ends.py."""
    return row._replace(x=row.x._replace(v=cast(row.plan.xp, row.x.v, row.plan.dtype)))


def _at(row: Row, first: int = 0, count: int = 1) -> LevelHeads:
    """Levels of the row's tokens."""
    T = max(row.spans[0].stop - row.spans[0].start, 1)
    if not row.plan.is_ragged and row.S is None:
        return LevelHeads(first, count, T, None)
    refuse("positions of tokens come from the host")
    return LevelHeads(first, count, T, row.mask(positions(row.spans).astype(np.int64)))


def _levels(row: Row, has_ends: bool) -> Iterator[LevelHeads]:
    """The levels above NEAR that a token reads or a state has, as many at once as their values take memory for."""
    last = max((s.last for s in row.spans if s.stop > s.start), default=0)
    levels = min(row.levels, last.bit_length() if has_ends else max(last - 1, 0).bit_length())
    most = max(policy.LEVEL_BYTES // max(row.x.v.nbytes, 1), 1)
    for first in range(NEAR + 1, levels + 1, most):
        yield _at(row, first, min(most, levels + 1 - first))


def _run(
    row: Row, x: Inputs, sequences: tuple[Sequence, ...], plan: Plan, S: Any = None, has_ends: bool = False
) -> Any:
    """The core's forward of the row's tokens, in batches of equal sequences if they are."""
    plan = plan._replace(sequences=sequences, returns_state=has_ends, has_state=S is not None, overwrite=False)
    return core.forward(row.fn, _cut(row, x, sequences), plan, S, row.wanted)


def _cut(row: Row, x: Inputs, sequences: tuple[Sequence, ...]) -> Inputs:
    """Arrays (tokens, heads, width) as (batch, T, heads, width) if sequences are of one length."""
    return Inputs(*(None if y is None else _shaped(row, y, sequences) for y in x))


def _shaped(row: Row, y: Array, sequences: tuple[Sequence, ...]) -> Array:
    if sequences[0].row is not None or y.ndim != 3:
        return y
    return row.plan.xp.reshape(y, (-1, sequences[0].stop, *y.shape[1:]))


def _flat(row: Row, y: Array) -> Array:
    return row.plan.xp.reshape(y, (prod(y.shape[:-2]), *y.shape[-2:]))


def _chunks(row: Row) -> tuple[Sequence, ...]:
    """The aligned chunks of 64 positions as sequences; one, of a batch, where all are of one length."""
    T = row.spans[0].stop - row.spans[0].start
    if not row.plan.is_ragged and row.S is None and (T % CHUNK == 0 or T < CHUNK):
        return (Sequence(None, 0, min(T, CHUNK)),)
    refuse("chunks of several lengths are packed by the host")
    return blocks(NEAR, row.spans).sequences


def _in_chunks(row: Row) -> Row:
    """The row with zeros after sequences of one length, up to a whole chunk; the row itself if they end in one."""
    T = row.spans[0].stop - row.spans[0].start
    if row.plan.is_ragged or row.S is not None or T % CHUNK == 0 or T < CHUNK:
        return row
    long = T + -T % CHUNK
    whole = row._replace(spans=tuple(Span(n * long, (n + 1) * long, 0) for n in range(len(row.spans))))
    given = {n: y for n, y in row.x._asdict().items() if y is not None}
    return whole._replace(x=row.x._replace(**_moved(row, whole, given)))


def _moved(row: Row, to: Row, arrays: dict[str, Array]) -> dict[str, Array]:
    """Arrays (tokens, heads, width) of `row` as of `to`: one of them is _in_chunks of the other."""
    if to is row:
        return arrays
    T, long = (own.spans[0].stop for own in (row, to))
    return dict(zip(arrays, resized(row.plan.xp, [*arrays.values()], T, long), strict=True))


def _unit(row: Row, sequences: tuple[Sequence, ...], heads: int) -> Array:
    """The rows of I of the tokens' positions in their chunks, one for all heads."""
    xp, x = row.plan.xp, row.x

    def table() -> Array:
        return cast(xp, xp.asarray(np.eye(CHUNK, dtype=np.float32), device=device(x.v)), x.v.dtype)

    unit = constant_array(xp, ("levels", str(x.v.dtype)), device(x.v), table)
    if sequences[0].row is None:
        C = sequences[0].stop
        return xp.broadcast_to(unit[None, :C, None, :], (x.v.shape[0] // C, C, heads, CHUNK))
    unit = xp.take(unit, row.mask(positions(row.spans) % CHUNK), axis=0)
    return xp.broadcast_to(unit[:, None, :], (x.v.shape[0], heads, CHUNK))


def _near(row: Row) -> tuple[Array, Near]:
    """(out of the levels 0 .. NEAR, residuals)."""
    xp, x, at, sequences = row.plan.xp, row.x, _at(row), _chunks(row)
    A, _, of_A = _run(row, x.core._replace(v=_unit(row, sequences, x.v.shape[-2])), sequences, row.plan)
    A = _flat(row, A)
    product = Inputs(weigh(xp, A, at, x.lam), _unit(row, sequences, 1), x.v)
    out, _, of_product = _run(row, product, sequences, row.plan._replace(scale=1.0))
    return _flat(row, out), Near(row, A, of_A, of_product)


def _near_vjp(saved: Near, dout: Array, d: Gradients) -> None:
    """Adds the gradients."""
    row = saved.row
    xp, sequences = row.plan.xp, _chunks(row)
    of, _ = core.backward(saved.product, _shaped(row, dout, sequences), None)
    dA, dlam = weigh_vjp(xp, saved.A, _at(row), row.x.lam, _flat(row, of.q))
    d.add(lam=dlam, v=_flat(row, of.v))
    dx, _ = core.backward(saved.of_A, _shaped(row, dA, sequences), None)
    _add_core(row, d, dx)


def _far(row: Row, at: LevelHeads, out: Any, has_ends: bool) -> tuple[Any, Any, Far]:
    """(out with these levels added, their states after each span, residuals)."""
    xp, x, (N, H, _, K, V) = row.plan.xp, row.x, row.state_shape
    if row.S is None and not has_ends:
        own = _cut(row, x.core, row.plan.sequences)
        if passes().takes(own, row.plan):
            y = _flat(row, passes().forward(own, row.plan, at.first, at.n))
            return gather(xp, y, at, "reads", x.v.dtype, x.lam, out), None, Far(at, y, None)
    heads = x.core._replace(v=spread(xp, x.v, at, "writes", x.v.dtype), g=spread(xp, x.g, at, "keeps", row.plan.dtype))
    if x.beta is not None:
        heads = heads._replace(beta=spread(xp, x.beta, at, "one", row.plan.dtype))
    S = None
    if row.S is not None:
        S = xp.reshape(mixed(row, _entering(row, at), row.S), (N, H * at.n, K, V))
    sequences = row.plan.sequences
    y, end, saved = _run(row, heads, sequences, row.plan, S, has_ends)
    if has_ends:
        end = _of_stays(row, at, xp.reshape(end, (N, H, at.n, K, V)))
    if y is not None:
        y = _flat(row, y)
        out = gather(xp, y, at, "reads", x.v.dtype, x.lam, out)
    return out, end, Far(at, y, saved)


def _far_vjp(row: Row, saved: Far, dout: Any, dS: Any, d: Gradients) -> None:
    """Adds the gradients; dS: of the states of the levels from the first one on, after each span."""
    at, y, residuals = saved
    xp, (N, H, _, K, V), dy, dend = row.plan.xp, row.state_shape, None, None
    if dout is not None and y is not None:
        dy = spread(xp, dout, at, "reads", row.x.v.dtype, row.x.lam, (y, d["lam"]))
        dy = _shaped(row, dy, row.plan.sequences)
    if dS is not None:
        dend = xp.reshape(_of_stays(row, at, dS[:, :, : at.n, ...]), (N, H * at.n, K, V))
    if dy is None and dend is None:
        return
    if residuals is None:
        _of_passes(row, at, dy, d)
        return
    dx, dbegin = core.backward(residuals, dy, dend)
    one = at._replace(first=0, n=1)
    d["v"] = gather(xp, _flat(row, dx.v), at, "writes", row.x.v.dtype, None, d.get("v"))
    for name, weight in (("g", "keeps"), ("beta", "one")):
        if (y := getattr(dx, name)) is not None:
            base = cast(xp, d[name], row.plan.dtype) if name in d else None
            d[name] = gather(xp, _flat(row, y), at, weight, row.plan.dtype, None, base)
    dx = dx._replace(g=None, beta=None)
    _add_core(row, d, dx if dy is not None else dx._replace(q=None), one)
    if row.S is not None:
        table = np.swapaxes(_entering(row, at), -1, -2)
        d.add(S=mixed(row, table, xp.reshape(dbegin, (N, H, at.n, K, V))))


def _of_passes(row: Row, at: LevelHeads, dy: Array, d: Gradients) -> None:
    """Adds the gradients of passes that skip what is 0, whose results are read where they are not."""
    xp, x = row.plan.xp, row.x
    dx = passes().backward(_cut(row, x.core, row.plan.sequences), row.plan, at.first, at.n, dy)
    for name, weight in (("q", "reads"), ("k", "writes"), ("v", "writes"), ("g", "one")):
        if (y := getattr(dx, name)) is not None:
            y, before = _flat(row, y), d[name]
            H = getattr(x, name).shape[-2]  # fewer keys than values
            base = before if H * at.n == y.shape[-2] else None
            y = gather(xp, y, at, weight, y.dtype, None, base)
            d[name] = y if base is before else added(xp, of_groups(xp, y, H, -2), before)


def _add_core(row: Row, d: Gradients, dx: Inputs, one: LevelHeads | None = None) -> None:
    """Adds gradients of q, k, g and beta."""
    more = {"k": dx.k if dx.r is None else dx.k + dx.r, "q": dx.q, "g": dx.g, "beta": dx.beta}
    for name, y in more.items():
        if y is not None:
            y = _flat(row, y)
            if name in d:
                y = gather(row.plan.xp, y, one or _at(row), "one", y.dtype, None, cast(row.plan.xp, d[name], y.dtype))
            d[name] = y


def _entering(row: Row, at: LevelHeads) -> np.ndarray:
    """(N, count, levels): the levels of an initial state that the first block of each level begins with."""
    level, old = np.arange(at.first, at.first + at.n)[:, None], np.arange(1, row.levels + 1)
    each = [np.where(bit(s.first, level), old == level, old < level) for s in row.spans]
    return np.array(each, np.float64).reshape(len(row.spans), at.n, row.levels)


def _of_stays(row: Row, at: LevelHeads, S: Array) -> Array:
    """States (N, H, count, K, V) of the levels that have tokens after each span, zeros of the others."""
    level = np.arange(at.first, at.first + at.n)
    stays = np.array([bit(s.last, level) for s in row.spans])[:, None, :, None, None]
    return row.plan.xp.where(row.mask(stays), S, row.zeros(()))
