"""Preprocessing steps for features that a backend does not implement itself, each with its transpose.

A step is a pair of functions, forward(run, module, x, plan, state) and backward(run, saved, dout, dstate), which wrap
the rest of the call, `run`: forward changes the inputs, runs the rest and changes the results; backward does the same
with gradients in reverse order. module: the backend's, which may have its own unit_rows.

    gates         g = -e^{A_log} softplus(raw + bias), or lower_bound sigmoid(e^{A_log} (raw + bias))
                  (ops/gate_formula.py)
    l2norm        y = q / |q| and k / |k|, zero rows stay 0           dx = (dy - y <y, dy>) / |x|
                  r = k or b * k is divided by |k| too; |x| is sqrt(x.x + plan.l2norm_eps)
    strengths     beta = f s, s = sigmoid(raw), f = plan.beta_sigmoid   draw = f s (1 - s) dbeta
    micro_steps   tokens of n steps; the first decays, the last reads
    pools         initial states are gathered from a pool, zeros for sequences that begin without one
    rotation      one token: the initial state is rotated by -theta, its gradient by theta
    own_writes    out_t = scale (e^{g_t} q_t S_{t-1} + own_t (q_t k_t^T) v_t), weight_t v_t is written, and
                  past_k^T past_v is added to the initial state
    rotations     queries and keys are rotated
    all_pairs     queries that are not causal are multiplied by the keys first, where that is less work
    late_queries  all queries read the final state
    first_position  states at position 0, or at none: the initial ones
    wide_keys     q S = sum over blocks b of channels of q_b S_b
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..core import StatesAt
from ..ops import gate_formula
from ..ops.norms import over_length, over_length_vjp, unit, unit_vjp
from ..ops.rotary import rotate, rotate_rows, rotate_vjp, rotation, rows_angle_vjp
from ..ops.rows import interleaved
from ..ops.sums import added, over_tokens, sum_of_groups
from ..runtime.arrays import Array, cast, device, is_cupy, shared_heads
from ..runtime.pools import take_rows
from . import policy
from .array import pairs
from .types import Decay, Erase, EraseKey, Inputs, Plan, ReadState, Saved, both

Rows = tuple[Array | None, ...]  # queries, keys
Run = Callable[..., Any]


class Changed(NamedTuple):
    """Residuals of a step that changes inputs alone: the inputs before it, and the residuals of the rest."""

    module: Any
    x: Inputs
    plan: Plan
    rest: Any


Step = tuple[Callable[..., tuple[Array | None, Any, Any]], Callable[..., tuple[Inputs, Any]]]


def of_inputs(inputs: Callable[..., Any], inputs_vjp: Callable[..., Inputs]) -> Step:
    """A step that changes nothing but inputs."""

    def forward(run: Run, module: Any, x: Inputs, plan: Plan, state: Array | None) -> tuple[Any, Any, Changed]:
        out, end, rest = run(*inputs(module, x, plan), state)
        return out, end, Changed(module, x, plan, rest)

    def backward(run: Run, saved: Changed, dout: Array | None, dstate: Any) -> tuple[Inputs, Any]:
        d, dstate0 = run(saved.rest, dout, dstate)
        return inputs_vjp(saved.module, saved.x, saved.plan, d), dstate0

    return forward, backward


# log decays before their formula


def _gates(module: Any, x: Inputs, plan: Plan) -> tuple[Inputs, Plan]:
    if plan.lower_bound is not None:
        g = gate_formula.bounded(plan.xp, x.g, _bounded(x, plan), plan.dtype, True)
    else:
        g = gate_formula.log_decay(plan.xp, x.g, x.A_log, x.bias, plan.dtype, True)
    return x._replace(g=g, A_log=None, bias=None), plan._replace(lower_bound=None)


def gates_vjp(module: Any, x: Inputs, plan: Plan, d: Inputs) -> Inputs:
    """Gradients of raw projections and of the parameters of their formula from those of log decays."""
    if d.g is None:
        return d
    dg = cast(plan.xp, d.g, plan.dtype)
    if plan.lower_bound is not None:
        da, dA, dbias = gate_formula.bounded_vjp(plan.xp, x.g, _bounded(x, plan), dg, True)
    else:
        da, dA, dbias = gate_formula.log_decay_vjp(plan.xp, x.g, x.A_log, x.bias, dg, True)
    return d._replace(g=da, A_log=dA, bias=dbias)


def _bounded(x: Inputs, plan: Plan) -> gate_formula.Bounded:
    return gate_formula.Bounded(plan.lower_bound or 0.0, x.A_log, x.bias)


# l2norm


def _l2norm(module: Any, x: Inputs, plan: Plan) -> tuple[Inputs, Plan]:
    """An erase vector that is a multiple of the key is normalised with it; one of its own is left unchanged."""
    rows = getattr(module, "unit_rows", unit_rows)
    q, k = rows(plan, (x.q, x.k))
    r = k if plan.erases_key else x.r
    if plan.erase_key is EraseKey.PRODUCT:
        wide_r, wide_k = (cast(plan.xp, y, plan.dtype) for y in (x.r, x.k))
        r = over_length(plan.xp, wide_r, wide_k, plan.l2norm_eps)
    return x._replace(q=q, k=k, r=r), plan._replace(l2norm=False, complement_keys=False)


def _l2norm_vjp(module: Any, x: Inputs, plan: Plan, d: Inputs) -> Inputs:
    """If the key is the erase vector too, its gradients are summed into dk; that of its length is added to dk."""
    rows_vjp = getattr(module, "unit_rows_vjp", unit_rows_vjp)
    dk, dr = (both(d.k, d.r), None) if plan.erases_key else (d.k, d.r)
    dq, dk = rows_vjp(plan, (None if d.q is None else x.q, x.k), (d.q, dk))
    if plan.erase_key is EraseKey.PRODUCT:
        wide_r, wide_k, wide_dr = (cast(plan.xp, y, plan.dtype) for y in (x.r, x.k, d.r))
        dr, dlength = over_length_vjp(plan.xp, wide_r, wide_k, wide_dr, plan.l2norm_eps)
        dk = added(plan.xp, cast(plan.xp, dk, plan.dtype), dlength)
    return d._replace(q=dq, k=dk, r=dr)


def unit_rows(plan: Plan, rows: Rows) -> Rows:
    """Rows divided by their L2 norm, in the compute dtype: by array calls or, on CuPy arrays, by a kernel."""
    wide = tuple(None if y is None else cast(plan.xp, y, plan.dtype) for y in rows)
    if is_cupy(plan.xp):
        from ..ops.cuda import unit_rows as kernel

        if kernel.takes(plan.xp, wide):
            return kernel.unit_rows(plan.xp, wide, plan.l2norm_eps)
    return tuple(None if y is None else unit(plan.xp, y, plan.l2norm_eps) for y in wide)


def unit_rows_vjp(plan: Plan, rows: Rows, grads: Rows) -> Rows:
    """The transpose of unit_rows; None for rows that are None."""
    xp = plan.xp
    rows, grads = (tuple(None if y is None else cast(xp, y, plan.dtype) for y in each) for each in (rows, grads))
    if is_cupy(xp):
        from ..ops.cuda import unit_rows as kernel

        if kernel.takes(xp, rows):
            return kernel.unit_rows_vjp(xp, rows, grads, plan.l2norm_eps)
    return tuple(None if y is None else unit_vjp(xp, y, dy, plan.l2norm_eps)
                 for y, dy in zip(rows, grads, strict=True))  # fmt: skip


# strengths before their sigmoid


def strengths(plan: Plan, raw: Array) -> Array:
    """The strengths of a call; strengths from raw projections have the compute dtype."""
    if not plan.beta_sigmoid:
        return raw
    return gate_formula.bounded(plan.xp, raw, gate_formula.Bounded(plan.beta_sigmoid), plan.dtype, True)


def _strengths(module: Any, x: Inputs, plan: Plan) -> tuple[Inputs, Plan]:
    return x._replace(beta=strengths(plan, x.beta)), plan._replace(beta_sigmoid=0.0)


def _strengths_vjp(module: Any, x: Inputs, plan: Plan, d: Inputs) -> Inputs:
    dbeta = cast(plan.xp, d.beta, plan.dtype)
    draw, _, _ = gate_formula.bounded_vjp(plan.xp, x.beta, gate_formula.Bounded(plan.beta_sigmoid), dbeta, True)
    return d._replace(beta=draw)


# micro-steps: q, g and out have one row per token, the other arrays one per micro-step


def _micro_steps(run: Run, module: Any, x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Any]:
    """A token's log decay goes to its first micro-step, its query to the last; the others get zeros."""
    out, end, rest = run(*_micro_inputs(module, x, plan), state)
    return of_last(plan, out), end, (plan, rest)


def _micro_inputs(module: Any, x: Inputs, plan: Plan) -> tuple[Inputs, Plan]:
    each = x._replace(q=at_last(plan, x.q), g=None if x.g is None else interleaved(plan.xp, x.g, plan.micro_steps, 0))
    return each, plan._replace(micro_steps=1)


def _micro_steps_vjp(run: Run, saved: Any, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    plan, rest = saved
    d, dstate0 = run(rest, at_last(plan, dout), dstate)
    return d._replace(q=of_last(plan, d.q), g=_rows(plan, d.g, 0)), dstate0


def at_last(plan: Plan, x: Array | None) -> Array | None:
    """x (..., T, heads, D) at the last step of each token, 0 at the others: (..., T n, heads, D)."""
    return None if x is None else interleaved(plan.xp, x, plan.micro_steps, plan.micro_steps - 1)


def of_last(plan: Plan, x: Array | None) -> Array | None:
    """The rows of x (..., T n, heads, D) at the last step of each token."""
    return _rows(plan, x, -1)


def _rows(plan: Plan, x: Array | None, step: int) -> Array | None:
    if x is None:
        return None
    (*lead, T, heads, D), xp = x.shape, plan.xp
    rows = xp.reshape(x, (*lead, T // plan.micro_steps, plan.micro_steps, heads, D))[..., step, :, :]
    return xp.ascontiguousarray(rows) if is_cupy(xp) else rows  # a recorded launch


# pools


def _pools(run: Run, module: Any, x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Any]:
    rows: Any = plan.pool_rows
    batch = x.v.shape[:-3] if plan.sequences[0].row is None else rows.at.shape
    return run(x, plan._replace(pool_rows=None), take_rows(plan.xp, state, rows, batch))


def _pools_vjp(run: Run, saved: Any, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    return run(saved, dout, dstate)


# one token whose state rotates


def _rotation(run: Run, module: Any, x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Any]:
    xp, cos_sin = plan.xp, None
    if state is not None:
        cos_sin = rotation(
            xp, x.theta[None, :], xp.ones((1, 1), dtype=x.theta.dtype, device=device(x.theta)), plan.dtype
        )
        state = rotate_rows(xp, cast(xp, state, plan.dtype), cos_sin, back=True)
    out, end, rest = run(x._replace(theta=None), plan, state)
    return out, end, (x, plan, cos_sin, state, rest)


def _rotation_vjp(run: Run, saved: Any, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    x, plan, cos_sin, state, rest = saved
    xp, (d, dstate0) = plan.xp, run(rest, dout, dstate)
    if state is None:
        return d._replace(theta=xp.zeros_like(x.theta)), dstate0
    dangle = rows_angle_vjp(xp, state, dstate0, x.theta.shape[0], dstate0.dtype, -1.0)
    return d._replace(theta=over_tokens(xp, dangle)), rotate_rows(xp, dstate0, cos_sin)


# queries and keys that are rotated


def _rotations(module: Any, x: Inputs, plan: Plan) -> tuple[Inputs, Plan]:
    q, k = (None if y is None else rotate(plan.xp, _with_own_rotations(x, plan, y), _cos_sin(x, plan), plan.dtype)
            for y in (x.q, x.k))  # fmt: skip
    return x._replace(q=q, k=k, rotation=None), plan


def _rotations_vjp(module: Any, x: Inputs, plan: Plan, d: Inputs) -> Inputs:
    """From y = rotate(x): dx is dy rotated back, and each pair's angle gets y_even dy_odd - y_odd dy_even."""
    cos_sin, grads, dangle = _cos_sin(x, plan), {}, None
    for name, y in (("q", x.q), ("k", x.k)):
        if y is not None and (dy := getattr(d, name)) is not None:
            rotated = rotate(plan.xp, _with_own_rotations(x, plan, y), cos_sin, plan.dtype)
            dx, more = rotate_vjp(plan.xp, rotated, cos_sin, cast(plan.xp, dy, plan.dtype))
            grads[name] = sum_of_groups(plan.xp, dx, y.shape[-2])
            more = plan.xp.sum(more, axis=-2, keepdims=True) if _is_shared(x) else more
            dangle = more if dangle is None else dangle + more
    return d._replace(**grads, rotation=dangle)


def _is_shared(x: Inputs) -> bool:
    return x.rotation.shape[-2] == 1


def _with_own_rotations(x: Inputs, plan: Plan, y: Array) -> Array:
    """Rows of every head that has rotations of its own."""
    return cast(plan.xp, y, plan.dtype) if _is_shared(x) else _of_heads(x, plan, y)


def _cos_sin(x: Inputs, plan: Plan) -> Array:
    """Cosines and sines (2, ..., T, H or 1, P)."""
    *lead, P = x.rotation.shape
    return plan.xp.moveaxis(plan.xp.reshape(x.rotation, (*lead, 2, P // 2)), -2, 0)


def _of_heads(x: Inputs, plan: Plan, y: Array) -> Array:
    """Rows that groups of heads share, of every head."""
    return shared_heads(plan.xp, cast(plan.xp, y, plan.dtype), x.v.shape[-2])


# a token's own write, which its query reads with another weight


def _own_writes(run: Run, module: Any, x: Inputs, plan: Plan, state: Array | None) -> tuple[Any, Any, Any]:
    """Keys are weighed, not values: a weight may come from a later token, and a NaN of keys does not go back."""
    v, reads = cast(plan.xp, x.v, plan.dtype), plan._replace(query_reads=ReadState.PREVIOUS)
    q, k = (None if y is None else _of_heads(x, plan, y) for y in (x.q, x.k))
    inner = x._replace(q=None if q is None else plan.xp.exp(x.g) * q, k=x.weight * k, v=v, weight=None, own=None,
                       past_k=None, past_v=None)  # fmt: skip
    if x.past_k is not None:
        S, past, value = (cast(plan.xp, y, plan.dtype) for y in (state, x.past_k, x.past_v))
        state = S + plan.xp.matrix_transpose(past) * value
    out, end, rest = run(inner, reads, state)
    if q is not None:
        out = out + plan.scale * x.own * plan.xp.sum(q * k, axis=-1, keepdims=True) * v
        out = cast(plan.xp, out, x.v.dtype)
    return out, end, (x, plan, rest)


def _own_writes_vjp(run: Run, saved: Any, dout: Array | None, dstate: Any) -> tuple[Inputs, Any]:
    """With s = scale q_t k_t^T and t = dout_t . v_t: dv += own s dout, down = s t, dq and dk += scale own t k and q."""
    x, plan, rest = saved
    d, dstate0 = run(rest, dout, dstate)
    xp, v, k = plan.xp, cast(plan.xp, x.v, plan.dtype), _of_heads(x, plan, x.k)
    dweight, dk = xp.sum(d.k * k, axis=-1, keepdims=True), x.weight * d.k
    d = d._replace(weight=dweight, own=xp.zeros_like(x.own))
    if x.past_k is not None:
        past, value = (cast(xp, y, plan.dtype) for y in (x.past_k, x.past_v))
        dpast = xp.sum(dstate0 * value, axis=-1)[..., None, :]
        d = d._replace(past_k=dpast, past_v=xp.sum(dstate0 * xp.matrix_transpose(past), axis=-2, keepdims=True))
    if x.q is None or dout is None:
        return d._replace(k=sum_of_groups(xp, dk, x.k.shape[-2])), dstate0
    q, dout, fade = _of_heads(x, plan, x.q), cast(xp, dout, plan.dtype), xp.exp(x.g)
    along, read = plan.scale * xp.sum(q * k, axis=-1, keepdims=True), xp.sum(dout * v, axis=-1, keepdims=True)
    share = plan.scale * x.own * read
    dg = d.g + xp.sum(fade * q * d.q, axis=-1, keepdims=True)
    dq = sum_of_groups(xp, fade * d.q + share * k, x.q.shape[-2])
    dk = sum_of_groups(xp, dk + share * q, x.k.shape[-2])
    return d._replace(q=dq, k=dk, v=d.v + x.own * along * dout, g=dg, own=along * read), dstate0


# queries that read the final state


class Late(NamedTuple):
    q: Array  # None: there are none, beside pairs.py
    plan: Plan
    end: Array
    rest: Any


def _late_queries(
    run: Run, module: Any, x: Inputs, plan: Plan, state: Array | None
) -> tuple[Array | None, Array, Late]:
    from .array.read import read_fwd

    _, ends, rest = run(x._replace(q=None), plan, state)
    if x.q is None:
        return None, ends, Late(None, plan, ends, rest)
    end = ends.end if isinstance(ends, StatesAt) else ends
    return cast(plan.xp, read_fwd(plan, x.q, end), x.v.dtype), ends, Late(x.q, plan, end, rest)


def _late_queries_vjp(run: Run, saved: Late, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    from .array.read import read_vjp

    q, plan, end, rest = saved
    if q is None:
        return run(rest, None, dstate)
    if dout is None:
        dq = plan.xp.zeros_like(cast(plan.xp, q, plan.dtype))
    else:
        dq, dread = read_vjp(plan, q, end, dout)
        dend, dat = dstate if isinstance(dstate, StatesAt) else (dstate, None)
        dend = dread if dend is None else dend + dread
        dstate = dend if dat is None else StatesAt(dend, dat)
    d, dstate0 = run(rest, None, dstate)
    return d._replace(q=dq), dstate0


# states at position 0, or at no position


def _first_position(run: Run, module: Any, x: Inputs, plan: Plan, state: Array | None) -> tuple[Any, Any, Any]:
    """The state at position 0 is the initial one, of a ragged batch that of the first sequence."""
    xp, later, first = plan.xp, (plan.states_at or ())[1:], state
    if plan.states_at and state is not None:  # which may be overwritten
        first = xp.asarray(cast(xp, state, plan.dtype), copy=True)
    out, end, rest = run(x, plan._replace(states_at=later or None), state)
    end, at = end if isinstance(end, StatesAt) else (end, None)
    if plan.states_at:
        first = xp.zeros_like(end) if first is None else first
        first = first[:1, ...] if plan.is_ragged else xp.expand_dims(first, axis=-4)
        at = first if at is None else xp.concat([first, at], axis=-4)
    else:
        at = xp.zeros((*end.shape[(1 if plan.is_ragged else 0) : -3], 0, *end.shape[-3:]), dtype=end.dtype)
    return out, StatesAt(end, at), (plan, rest)


def _first_position_vjp(run: Run, saved: Any, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    plan, rest = saved
    dend, dat = dstate if isinstance(dstate, StatesAt) else (dstate, None)
    if dat is None:
        return run(rest, dout, dend)
    later: Any = dend
    if len(plan.states_at) > 1:
        later = StatesAt(dend, dat[..., 1:, :, :, :])
    elif dend is None and dout is None:
        lead = (len(plan.sequences),) if plan.is_ragged else dat.shape[:-4]
        later = plan.xp.zeros((*lead, *dat.shape[-3:]), dtype=plan.dtype, device=device(dat))
    d, dstate0 = run(rest, dout, later)
    if not plan.states_at:
        return d, dstate0
    first = cast(plan.xp, dat[..., 0, :, :, :], plan.dtype)
    if not plan.is_ragged:
        return d, dstate0 + first
    return d, plan.xp.concat([dstate0[:1, ...] + first, dstate0[1:, ...]], axis=0)


# keys wider than a backend supports: without an erase the key channels are independent


class Wide(NamedTuple):
    x: Inputs
    plan: Plan
    rest: list[Any]  # residuals of each block of channels


def cuts(x: Inputs) -> list[slice]:
    """The blocks of key channels: one if the CUDA kernels support the width, or if the variant erases."""
    K, most = x.k.shape[-1], policy.WIDEST_CUDA
    if most >= K or x.erase is not Erase.NONE:
        return [slice(0, K)]
    count = -(-K // most)
    each = -(-K // count)
    each += -each % 8 if each + (-each % 8) <= most else 0  # multiples of 8 channels: full vector loads
    return [slice(n, min(n + each, K)) for n in range(0, K, each)]


def part(x: Inputs, channels: slice) -> Inputs:
    """The call of a block of channels."""
    if channels == slice(0, x.k.shape[-1]):
        return x
    cut = {n: y[..., channels] for n, y in x._asdict().items() if n in ("q", "k", "u") and y is not None}
    if x.decay is Decay.VECTOR:
        cut["g"] = x.g[..., channels]
    return x._replace(**cut)


def _wide_keys(run: Run, module: Any, x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Wide]:
    """Outputs are summed in the compute dtype, in block order; states are concatenated along the key axis."""
    xp, wide = plan.xp, x._replace(v=cast(plan.xp, x.v, plan.dtype))
    inner = plan._replace(overwrite=False)
    results = [run(part(wide, c), inner, None if state is None else state[..., c, :]) for c in cuts(x)]
    out = None
    for one, _, _ in results:
        out = one if out is None or one is None else added(xp, out, one)
    ends = [end for _, end, _ in results]
    if plan.states_at is None:
        end: Any = xp.concat(ends, axis=-2)
    else:
        end = StatesAt(*(xp.concat(list(each), axis=-2) for each in zip(*ends, strict=True)))
    return None if out is None else cast(xp, out, x.v.dtype), end, Wide(x, plan, [rest for _, _, rest in results])


def wide_keys_vjp(run: Run, saved: Wide, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """dv, dgv and a scalar dg are summed; dq, dk, a vector dg and du are concatenated along the key axis."""
    xp, x = saved.plan.xp, saved.x
    results = [run(one, dout, _rows_of(dstate, c)) for one, c in zip(saved.rest, cuts(x), strict=True)]
    grads = {}
    for name, y in x._asdict().items():
        parts = [getattr(d, name) for d, _ in results]
        if y is None or parts[0] is None:
            continue
        concatenated = name in ("q", "k", "u") or (name == "g" and x.decay is Decay.VECTOR)
        grads[name] = xp.concat(parts, axis=-1) if concatenated else sum(parts[1:], parts[0])
    return Inputs(**{n: grads.get(n) for n in Inputs._fields}), xp.concat([dS for _, dS in results], axis=-2)


def _rows_of(dstate: Any, channels: slice) -> Any:
    """The key channels of a gradient of states."""
    if isinstance(dstate, StatesAt):
        return StatesAt(*(_rows_of(d, channels) for d in dstate))
    return None if dstate is None else dstate[..., channels, :]


OF_INPUTS = {  # steps that change inputs alone: (module, x, plan) -> (x, plan), and the transpose
    "gates": (_gates, gates_vjp),
    "l2norm": (_l2norm, _l2norm_vjp),
    "strengths": (_strengths, _strengths_vjp),
}
PREPROCESSING: dict[str, Step] = {  # in this order; core.py says when a call needs a step
    **{name: of_inputs(*pair) for name, pair in OF_INPUTS.items()},
    "micro_steps": (_micro_steps, _micro_steps_vjp),
    "pools": (_pools, _pools_vjp),
    "rotation": (_rotation, _rotation_vjp),
    "own_writes": (_own_writes, _own_writes_vjp),
    "rotations": of_inputs(_rotations, _rotations_vjp),
    "all_pairs": (pairs.forward, pairs.backward),
    "late_queries": (_late_queries, _late_queries_vjp),
    "first_position": (_first_position, _first_position_vjp),
    "wide_keys": (_wide_keys, wide_keys_vjp),
}


def backward_behind(
    names: Sequence[str], module: Any, saved: Saved, dout: Array | None, dstate: Any
) -> tuple[Inputs, Any]:
    """The module's backward of a call whose forward has computed these steps in its kernels."""
    back: Any = module.backward
    begin: Any = lambda x, plan, state: (None, None, Saved(x, plan, state, saved.starts))  # noqa: E731
    for name in reversed(names):
        forward, backward = PREPROCESSING[name]
        begin, back = functools.partial(forward, begin, module), functools.partial(backward, back)
    return back(begin(saved.x, saved.plan, saved.state)[2], dout, dstate)
