"""The definition, token by token, and its adjoint. Never optimised: all other files here are tested against it.

Every vector is a row: q, k (..., 1, K), v (..., 1, V), state S (..., K, V).

    S~ = diag(e^{g_t}) S_{t-1} diag(e^{gv_t})
    erase NONE    S_t = S~ + k_t^T v_t
    erase DELTA   S_t = S~ + k_t^T beta_t (v_t - r_t S~)        or r_t S_{t-1}, by plan.erase_row
    erase FREE    S_t = S~ + b_t^T (a_t S_{t-1}) + k_t^T v_t
    read AFTER    out_t = scale q_t S_t
    read BEFORE   out_t = scale (q_t S_{t-1} + (q_t (.) u) k_t^T v_t)
"""

from __future__ import annotations

from typing import NamedTuple

from ...ground.namespace import Array, Namespace, cast, device, sum_to
from ..kinds import Erase, Row
from .chunks import gather_states, initial_state
from .heads import TokenBuffer, groups, split, split_all, take
from .inputs import Inputs, Plan, Saved


class Step(NamedTuple):
    """One token: the state before, faded, after; what the erase vector recalled; what was written."""

    before: Array
    faded: Array
    after: Array
    recalled: Array | None
    written: Array
    out: Array | None


def step_fwd(xp: Namespace, x: Inputs, plan: Plan, S: Array) -> Step:
    """One token forward."""
    T = xp.matrix_transpose
    faded = _fade(xp, x, S)
    recalled, written = None, x.v
    if x.erase is Erase.DELTA:
        recalled = x.r @ (faded if plan.erase_row is Row.DECAYED else S)
        written = x.beta * (x.v - recalled)
    after = faded + sum_to(xp, T(x.k) @ written, S.shape)
    if x.erase is Erase.FREE:
        recalled = x.a @ S
        after = after + sum_to(xp, T(x.b) @ recalled, S.shape)
    out = None
    if x.q is not None:
        out = x.q @ (after if plan.query_row is Row.AFTER else S)
        if x.u is not None:
            out = out + xp.sum(x.q * x.u * x.k, axis=-1, keepdims=True) * x.v
        out = plan.scale * out
    return Step(S, faded, after, recalled, written, out)


def step_vjp(
    xp: Namespace, x: Inputs, plan: Plan, s: Step, dout: Array | None, dS: Array
) -> tuple[dict[str, Array], Array]:
    """(gradients by name, dS_{t-1}) from dout_t and the gradient dS of S_t by all that comes later."""
    T, d = xp.matrix_transpose, {}
    dbefore = xp.zeros_like(dS)
    dk_read = 0.0
    dv_read = 0.0
    if dout is not None and x.q is not None:
        c = plan.scale * dout
        seen = s.after if plan.query_row is Row.AFTER else s.before
        d["q"] = c @ T(seen)
        read = sum_to(xp, T(x.q) @ c, dS.shape)
        if plan.query_row is Row.AFTER:
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
    dfaded = dS
    if x.erase is Erase.DELTA:
        derror = x.beta * dwritten
        d["beta"] = xp.sum(dwritten * (x.v - s.recalled), axis=-1, keepdims=True)
        d["v"] = derror
        decayed = plan.erase_row is Row.DECAYED
        d["r"] = -derror @ T(s.faded if decayed else s.before)
        unread = sum_to(xp, T(x.r) @ derror, dS.shape)
        dfaded, dbefore = (dfaded - unread, dbefore) if decayed else (dfaded, dbefore - unread)
    if x.erase is Erase.FREE:
        drecalled = x.b @ dS
        d["b"] = s.recalled @ T(dS)
        d["a"] = drecalled @ T(s.before)
        dbefore = dbefore + sum_to(xp, T(x.a) @ drecalled, dS.shape)
    product = s.faded * dfaded  # d e^{g} / dg = e^{g}
    if x.g is not None:
        d["g"] = T(xp.sum(product, axis=-1, keepdims=True))
        d["g"] = xp.sum(d["g"], axis=-1, keepdims=True) if x.g.shape[-1] == 1 else d["g"]
    if x.gv is not None:
        d["gv"] = xp.sum(product, axis=-2, keepdims=True)
    return d, dbefore + _fade(xp, x, dfaded)


def _fade(xp: Namespace, x: Inputs, S: Array) -> Array:
    """diag(e^g) S diag(e^gv)."""
    if x.g is not None:
        S = S * xp.matrix_transpose(xp.exp(x.g))
    return S if x.gv is None else S * xp.exp(x.gv)


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Saved]:
    """(out, final state, saved)."""
    xp, G = plan.xp, groups(x)
    core, out = split_all(xp, x, G), None
    if x.q is not None:
        H = max(x.q.shape[-2], x.v.shape[-2])
        out = TokenBuffer(xp, (*x.v.shape[:-2], H, x.v.shape[-1]), x.v.dtype, device(x.v))
    ends = []
    for sequence in plan.sequences:
        S = initial_state(core, plan, state, sequence.row, G)
        for t in range(sequence.start, sequence.stop):
            s = step_fwd(xp, take(xp, core, t, t + 1, plan.dtype), plan, S)
            S = s.after
            if out is not None:
                out.put(t, s.out)
        ends.append(S)
    return None if out is None else out.done(), gather_states(plan, ends), Saved(x, plan, state, None)


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input, in the dtype of the computation, and of the initial state."""
    x, plan, state, _ = saved
    xp, G = plan.xp, groups(x)
    core = split_all(xp, x, G)
    dcore = None if dout is None else split(xp, dout, G)
    buffers = {
        name: TokenBuffer(xp, tuple(y.shape), plan.dtype, device(x.v))
        for name, y in x._asdict().items()
        if y is not None and name != "u"
    }
    du: Array = None if x.u is None else xp.zeros_like(cast(xp, core.u, plan.dtype))
    begins = []
    for sequence in plan.sequences:
        S, steps = initial_state(core, plan, state, sequence.row, G), []
        for t in range(sequence.start, sequence.stop):
            steps.append(step_fwd(xp, take(xp, core, t, t + 1, plan.dtype), plan, S))
            S = steps[-1].after
        dS = initial_state(core, plan, dstate, sequence.row, G)
        for t in reversed(range(sequence.start, sequence.stop)):
            d = None if dcore is None else cast(xp, dcore[..., t : t + 1, :], plan.dtype)
            step = steps[t - sequence.start]
            grads, dS = step_vjp(xp, take(xp, core, t, t + 1, plan.dtype), plan, step, d, dS)
            if "u" in grads:
                du = du + sum_to(xp, grads.pop("u"), du.shape)
            for name, y in grads.items():
                buffers[name].put(t, y)
        begins.append(dS)
    arrays = {name: buffer.done() for name, buffer in buffers.items()}
    if du is not None:
        arrays["u"] = xp.reshape(du, x.u.shape)
    return Inputs(**{name: arrays.get(name) for name in Inputs._fields}), gather_states(plan, begins)
