"""LEVELS read-out, log-linear attention: token j counts for token i with the weight of their level.

    S_t^(l)   the part of the state S_t that tokens of level(t, j) = l have written
    out_t   = scale sum over l of lam_t[l] q_t S_t^(l)

With A_ij = scale q_i M_i ... M_{j+1} k_j, the influence without weights, out_i = sum over j <= i of
A_ij lam_i[level(i, j)] v_j. Levels are those of the positions of tokens (blocks.py). Spans of
NumPy arrays go token by token in compiled loops (loops.py, cpu/levels.py), short ones of other arrays by calls of the
core (steps.py). Longer ones are four sums, each of which calls the core:

    near   levels 0 .. c, inside of aligned chunks of 2^c positions
    far    each level l > c, by blocks of 2^l positions
    head   tokens of the first chunk read the levels 1 .. c of the initial state
    tail   levels 1 .. c of the final state

The adjoint of each sum is the core's, and dlam_i[l] = scale <dout_i, q_i S_i^(l)>.
"""

from __future__ import annotations

import sys
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ....core import Computed, Explained, register
from ....runtime.arrays import Array, cast, count_dtype, device
from ....runtime.constants import constant_array
from ....runtime.recorder import refuse
from ... import core, policy
from ...types import LevelState, Plan
from . import heads, loops, steps, sums
from .blocks import Span
from .rows import Gradients, Row, of_groups, of_live, packed, part, taken, tokens_of
from .rows import LevelInputs as LevelInputs


class Job(NamedTuple):
    """Spans that are computed together, by their numbers."""

    form: ModuleType  # heads, loops, steps or sums
    spans: list[int]


class Residuals(NamedTuple):
    """Residuals of a forward pass."""

    row: Row
    x: LevelInputs  # as given
    state: LevelState | None
    jobs: list[Job]
    saved: list[Any]

    def backward(self, dout: Any, dstate: LevelState | None) -> tuple[LevelInputs, LevelState | None]:
        """Gradients of every input, and of the initial state."""
        return _backward(self, dout, dstate)


def forward(fn: str, x: LevelInputs, plan: Plan, state: LevelState | None, wanted: str | None) -> Computed:
    """(out, state after the last token, residuals).   Raises ValueError for too few levels."""
    if loops.takes(fn, x, plan, wanted) and (found := loops.compiled().forward(x, plan, state)) is not None:
        return found
    together = heads.takes(fn, x, plan, wanted)
    if not together or state is not None:
        refuse("the sums depend on the positions of the tokens")
    row = packed(fn, x, plan, state, wanted, x.v.dtype if together else plan.dtype)
    jobs = [Job(heads, [*range(len(row.spans))])] if together else jobs_of(row)
    outs, ends, saved = zip(*(job.form.forward(part(row, job.spans)) for job in jobs), strict=True)
    out = None
    if x.q is not None:
        out = _in_order(row, [*outs], [tokens_of([row.spans[n] for n in job.spans]) for job in jobs])
        out = cast(plan.xp, plan.xp.reshape(out, (*x.v.shape[:-2], *out.shape[-2:])), x.v.dtype)
    S = _in_order(row, [*ends], [np.array(job.spans, np.int64) for job in jobs])
    return out, _end(row, x, S, state), Residuals(row, x, state, jobs, [*saved])


def jobs_of(row: Row) -> list[Job]:
    """Short spans of each length, and all others; one job, of nothing, without spans."""
    by_form: dict[int, list[int]] = {}
    for n, s in enumerate(row.spans):
        length = s.stop - s.start
        by_form.setdefault(key_of(row, length), []).append(n)
    return [Job(FORMS.get(length, steps), spans) for length, spans in by_form.items()] or [Job(steps, [])]


LONG, IN_LOOPS = -1, -2
FORMS = {LONG: sums, IN_LOOPS: loops}


def key_of(row: Row, length: int) -> int:
    """Spans of one key are computed together: of array calls those of one length."""
    if length and loops.is_short(row.fn, row.x, row.plan, row.wanted, length):
        return IN_LOOPS
    return length if is_short(row, length) else LONG


def is_short(row: Row, length: int) -> bool:
    """Whether a span goes token by token."""
    size = row.plan.chunk_size
    return size == 1 or row.wanted == "reference" or (size is None and length <= policy.SHORT_ARRAY)


def _in_order(row: Row, parts: list[Array], at: list[np.ndarray]) -> Array:
    """Rows of the jobs in the order of the call."""
    return taken(row, row.plan.xp.concat(parts, axis=0) if len(parts) > 1 else parts[0], np.argsort(np.concatenate(at)))


def _end(row: Row, x: LevelInputs, S: Array, state: LevelState | None) -> LevelState:
    """The final state: of one head of each group."""
    xp, plan = row.plan.xp, row.plan
    S = S[:, :: S.shape[1] // max(x.v.shape[-2], 1), ...] if x.v.shape[-2] != S.shape[1] else S
    lead = (len(row.spans),) if plan.is_ragged else tuple(x.v.shape[:-3])
    after = np.array([s.last for s in row.spans], np.int64).reshape(lead)

    def position() -> Array:
        return xp.asarray(after, dtype=count_dtype(xp), device=device(x.v))

    if plan.returns_state:
        return LevelState(xp.reshape(S, (*lead, *S.shape[1:])), position())
    key = ("position", lead, after.tobytes())
    return LevelState(xp.reshape(S, (*lead, *S.shape[1:])), constant_array(xp, key, device(x.v), position))


def backward(residuals: Any, dout: Any, dstate: LevelState | None) -> tuple[LevelInputs, LevelState | None]:
    """Gradients of every input, and of the initial state."""
    gradients: tuple[LevelInputs, LevelState | None] = residuals.backward(dout, dstate)
    return gradients


def _backward(residuals: Residuals, dout: Any, dstate: LevelState | None) -> tuple[LevelInputs, LevelState | None]:
    row, _, _, jobs, saved = residuals
    xp, dS = row.plan.xp, None
    if dstate is not None:
        dS = cast(xp, xp.reshape(dstate.S, (prod(dstate.S.shape[:-4]), *dstate.S.shape[-4:])), row.plan.dtype)
        dS = of_live(row, _of_first(row, dS), [s.last for s in row.spans])
    if dout is not None:
        dout = cast(xp, xp.reshape(dout, (prod(dout.shape[:-2]), *dout.shape[-2:])), row.x.v.dtype)
    spans = [np.array(job.spans, np.int64) for job in jobs]
    tokens = [tokens_of([row.spans[n] for n in job.spans]) for job in jobs]
    each = [
        job.form.backward(own, *(None if d is None else taken(row, d, at) for d, at in ((dout, t), (dS, s))))
        for job, own, t, s in zip(jobs, saved, tokens, spans, strict=True)
    ]
    d = Gradients()
    for name in {name for one in each for name in one}:
        at, shape = (spans, row.state_shape) if name == "S" else (tokens, getattr(row.x, name).shape)
        parts = [one[name] if name in one else row.zeros((a.size, *shape[1:])) for one, a in zip(each, at, strict=True)]
        d[name] = _in_order(row, parts, at)
    return _unpacked(residuals, d)


def _of_first(row: Row, dS: Array) -> Array:
    """The transpose of taking the first head of each group."""
    N, heads, *rest = dS.shape
    if (H := row.x.v.shape[-2]) == heads:
        return dS
    first = row.plan.xp.reshape(dS, (N, heads, 1, *rest))
    dS = row.plan.xp.concat([first, row.zeros((N, heads, H // heads - 1, *rest))], axis=2)
    return row.plan.xp.reshape(dS, (N, H, *rest))


def _unpacked(residuals: Residuals, d: Gradients) -> tuple[LevelInputs, LevelState | None]:
    """Gradients in the shapes of the inputs."""
    row, x, state = residuals.row, residuals.x, residuals.state
    xp, found, dstate = row.plan.xp, {}, None
    for name, y in zip(LevelInputs._fields, x, strict=True):
        if y is None or name not in d:
            found[name] = None if y is None else row.zeros(y.shape)
        else:
            found[name] = xp.reshape(of_groups(xp, d[name], y.shape[-2], -2), tuple(y.shape))
    if state is not None:
        dS = of_live(row, d.get("S", row.zeros(row.state_shape)), [s.first for s in row.spans])
        dstate = state._replace(S=xp.reshape(of_groups(xp, dS, state.S.shape[-4], -4), tuple(state.S.shape)))
    return LevelInputs(**found), dstate


def explain(fn: str, x: LevelInputs, plan: Plan, wanted: str | None) -> Explained:
    """Backend, form and operations: one pass for near levels, one for each level above them."""
    row = Row(fn, wanted, plan, x, tuple(Span(s.start, s.stop, 0) for s in plan.sequences), None)
    T = max((s.stop - s.start for s in plan.sequences), default=0)
    if heads.takes(fn, x, plan, wanted):
        far = max(int(T - 1).bit_length() - heads.NEAR, 0)
        words = f"levels 0 to {heads.NEAR} in chunks of {heads.CHUNK}, {far} above them as heads of one call"
        return core.explain_memories(fn, [x.core] * (1 + far), plan, wanted, words)
    if key_of(row, T) != LONG:
        return core.explain_memories(fn, [x.core], plan, wanted, f"token by token, {row.levels + 1} levels each")
    c = sums.last_near(row)
    far = max(int(T - 1).bit_length() - c, 0)
    words = f"levels 0 to {c} in chunks of {1 << c}, and {far} above them, one pass each"
    return core.explain_memories(fn, [x.core] * (1 + far), plan, wanted, words)


def gives_states(fn: str, x: LevelInputs, plan: Plan, wanted: str | None) -> bool:
    """Calls with states at positions are computed in pieces."""
    return False


def reads_out(residuals: Residuals) -> bool:
    """Whether backward reads the output."""
    return False


def reads_end(residuals: Residuals) -> bool:
    """Whether backward reads the final state."""
    return False


register(sys.modules[__name__], LevelInputs)
