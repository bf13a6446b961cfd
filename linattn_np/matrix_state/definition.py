"""The definition, token by token, and its adjoint. Not optimised: every other backend is tested against it.

Every vector is a row: q, k (..., 1, K), v (..., 1, V), state S (..., K, V).

    S~ = diag(e^{g_t}) S_{t-1} diag(e^{gv_t})
    erase NONE    S_t = S~ + k_t^T v_t
    erase DELTA   S_t = S~ + k_t^T beta_t (v_t - r_t S~)        or r_t S_{t-1}, by plan.erase_reads
    erase FREE    S_t = S~ + b_t^T (a_t S_{t-1}) + k_t^T v_t
    reads UPDATED   out_t = scale q_t S_t
    reads PREVIOUS  out_t = scale (q_t S_{t-1} + (q_t (.) u) k_t^T v_t)
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..runtime.arrays import Array, Namespace, cast, device, sum_to
from ..runtime.shapes import Chunk, Sequence, segments
from .heads import TokenBuffer, gather_states, gradient_buffers, groups, initial_state, split, split_all, take
from .segments import Segments, SegmentTable, gradients_at, with_positions
from .types import Erase, Inputs, Plan, ReadState, Saved


class Step(NamedTuple):
    """One token: the state before it, decayed, after it; the value that the erase vector reads; the value written."""

    before: Array
    decayed_state: Array
    after: Array
    predicted: Array | None
    written: Array
    out: Array | None


def step_fwd(xp: Namespace, x: Inputs, plan: Plan, S: Array) -> Step:
    """One token forward."""
    T = xp.matrix_transpose
    decayed_state = _decayed(xp, x, S)
    predicted, written = None, x.v
    if x.erase is Erase.DELTA:
        predicted = x.r @ (decayed_state if plan.erase_reads is ReadState.DECAYED else S)
        written = x.beta * (x.v - predicted)
    after = decayed_state + sum_to(xp, T(x.k) @ written, S.shape)
    if x.erase is Erase.FREE:
        predicted = x.a @ S
        after = after + sum_to(xp, T(x.b) @ predicted, S.shape)
    out = None
    if x.q is not None:
        out = x.q @ (after if plan.query_reads is ReadState.UPDATED else S)
        if x.u is not None:
            out = out + xp.sum(x.q * x.u * x.k, axis=-1, keepdims=True) * x.v
        out = plan.scale * out
    return Step(S, decayed_state, after, predicted, written, out)


def step_vjp(
    xp: Namespace, x: Inputs, plan: Plan, s: Step, dout: Array | None, dS: Array
) -> tuple[dict[str, Array], Array]:
    """(gradients by name, dS_{t-1}) from dout_t and dS, the gradient of S_t by all later tokens."""
    T, d = xp.matrix_transpose, {}
    dbefore = xp.zeros_like(dS)
    dk_read = 0.0
    dv_read = 0.0
    if dout is not None and x.q is not None:
        c = plan.scale * dout
        state = s.after if plan.query_reads is ReadState.UPDATED else s.before
        d["q"] = c @ T(state)
        read = sum_to(xp, T(x.q) @ c, dS.shape)
        if plan.query_reads is ReadState.UPDATED:
            dS = dS + read
        else:
            dbefore = dbefore + read
        if x.u is not None:  # sum_d q_d u_d k_d v
            cv = xp.sum(c * x.v, axis=-1, keepdims=True)
            d["q"] = d["q"] + cv * x.u * x.k
            dk_read = sum_to(xp, cv * x.u * x.q, x.k.shape)
            dv_read = sum_to(xp, xp.sum(x.q * x.u * x.k, axis=-1, keepdims=True) * c, x.v.shape)
            d["u"] = cv * x.q * x.k
    dwritten = x.k @ dS
    d["k"] = sum_to(xp, s.written @ T(dS), x.k.shape) + dk_read
    d["v"] = dwritten + dv_read
    ddecayed = dS
    if x.erase is Erase.DELTA:
        derror = x.beta * dwritten
        d["beta"] = xp.sum(dwritten * (x.v - s.predicted), axis=-1, keepdims=True)
        d["v"] = derror
        reads_decayed = plan.erase_reads is ReadState.DECAYED
        d["r"] = -derror @ T(s.decayed_state if reads_decayed else s.before)
        dread = sum_to(xp, T(x.r) @ derror, dS.shape)
        ddecayed, dbefore = (ddecayed - dread, dbefore) if reads_decayed else (ddecayed, dbefore - dread)
    if x.erase is Erase.FREE:
        dpredicted = x.b @ dS
        d["b"] = s.predicted @ T(dS)
        d["a"] = dpredicted @ T(s.before)
        dbefore = dbefore + sum_to(xp, T(x.a) @ dpredicted, dS.shape)
    product = s.decayed_state * ddecayed  # d e^{g} / dg = e^{g}
    if x.g is not None:
        d["g"] = T(xp.sum(product, axis=-1, keepdims=True))
        d["g"] = xp.sum(d["g"], axis=-1, keepdims=True) if x.g.shape[-1] == 1 else d["g"]
    if x.gv is not None:
        d["gv"] = xp.sum(product, axis=-2, keepdims=True)
    return d, dbefore + _decayed(xp, x, ddecayed)


def _decayed(xp: Namespace, x: Inputs, S: Array) -> Array:
    """diag(e^g) S diag(e^gv)."""
    if x.g is not None:
        S = S * xp.matrix_transpose(xp.exp(x.g))
    return S if x.gv is None else S * xp.exp(x.gv)


def sequence_forward(
    core: Inputs, plan: Plan, table: list[Chunk], S: Array, put: Callable[[int, Array], None] | None
) -> tuple[Array, Array]:
    """(final state, S_0) of one sequence; outputs go to put(t, out)."""
    S_0 = S
    for t in _tokens(table):
        s = step_fwd(plan.xp, take(plan.xp, core, t, t + 1, plan.dtype), plan, S)
        S = s.after
        if put is not None:
            put(t, s.out)
    return S, S_0


def sequence_backward(
    core: Inputs,
    plan: Plan,
    table: list[Chunk],
    S: Array,
    dout: Array | None,
    dS: Array,
    put: Callable[[int, dict[str, Array]], None],
) -> Array:
    """dS_0 of one sequence; gradients go to put(t, gradients)."""
    xp, steps = plan.xp, []
    for t in _tokens(table):
        steps.append((t, step_fwd(xp, take(xp, core, t, t + 1, plan.dtype), plan, S)))
        S = steps[-1][1].after
    for t, step in reversed(steps):
        d = None if dout is None else cast(xp, dout[..., t : t + 1, :], plan.dtype)
        grads, dS = step_vjp(xp, take(xp, core, t, t + 1, plan.dtype), plan, step, d, dS)
        put(t, grads)
    return dS


def _tokens(table: list[Chunk]) -> list[int]:
    return [t for chunk in table for t in range(chunk.start, chunk.stop)]


TOKEN_LOOP = SimpleNamespace(forward=sequence_forward, backward=sequence_backward)


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Saved]:
    """(out, final state, saved)."""
    xp, G = plan.xp, groups(x)
    core, out = split_all(xp, x, G), None
    if x.q is not None:
        H = max(x.q.shape[-2], x.v.shape[-2])
        out = TokenBuffer(xp, (*x.v.shape[:-2], H, x.v.shape[-1]), x.v.dtype, device(x.v))
    ends, at = [], []
    for sequence in plan.sequences:
        S, parts = initial_state(core, plan, state, sequence.row, G), _segments(plan, sequence)
        states, _ = parts.forward(core, plan, S, out.put if out is not None else None)
        ends.append(states[-1])
        at += [S for S, table in zip(states, parts.tables, strict=True) if table.at >= 0]
    end = with_positions(plan, gather_states(plan, ends), at)
    return None if out is None else out.done(), end, Saved(x, plan, state, None)


def _segments(plan: Plan, sequence: Sequence) -> Segments:
    """A sequence token by token."""
    cuts = segments(sequence, plan.states_at or ())
    return Segments(TOKEN_LOOP, [SegmentTable([Chunk(s.start, s.stop)], at) for s, at in cuts])


def backward(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input, in the dtype of the computation, and of the initial state."""
    x, plan, state, _ = saved
    xp, G = plan.xp, groups(x)
    core = split_all(xp, x, G)
    dcore = None if dout is None else split(xp, dout, G)
    buffers = gradient_buffers(x, plan)
    bonus: list[Array] = []

    def put(t: int, grads: dict[str, Array]) -> None:
        for name, d in grads.items():
            if name == "u":
                bonus.append(sum_to(xp, d, core.u.shape))
            else:
                buffers[name].put(t, d)

    begins, (dend, dat) = [], gradients_at(core, plan, dstate, G)
    for sequence in plan.sequences:
        S, parts = initial_state(core, plan, state, sequence.row, G), _segments(plan, sequence)
        ends, _ = Segments(TOKEN_LOOP, parts.tables[:-1]).forward(core, plan, S, None)
        dS = initial_state(core, plan, dend, sequence.row, G)
        begins.append(parts.backward(core, plan, [S, *ends], dcore, dS, dat, put))
    arrays = {name: buffer.done() for name, buffer in buffers.items()}
    if x.u is not None:
        arrays["u"] = xp.reshape(sum(bonus, xp.zeros_like(cast(xp, core.u, plan.dtype))), x.u.shape)
    return Inputs(**{name: arrays.get(name) for name in Inputs._fields}), gather_states(plan, begins)
