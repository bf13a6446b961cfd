"""Gradients of a vector decay or a free rank-one term token by token, for every dtype, width and device.

Four traversals of the tokens, no one of them in chunks (token/tiles.cuh has the equations): the vectors w that a
free rank-one term reads (values.cu); dv, dw and the gradient of the first state, from the last token on; given w and
dw, channels are independent: dq and da (channels.cu), then dk, db and dg from the last token on. The delta rule is a
free rank-one term with a = -beta r e^g, b = k and values beta v.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ....core import StatesAt
from ....ops.cuda.arguments import address, rows_of
from ....ops.sums import sum_of_groups
from ....runtime.arrays import Array, cast, dtype_name, shared_heads
from ....runtime.cuda.elements import ELEMENTS
from ... import definition, policy
from ...array import chunks as array_calls
from ...types import Decay, Erase, Inputs, Plan, ReadState, Saved
from .. import arguments
from ..operands import dense_rows, element_of, is_wide, shaped
from . import gradients_plan as cuts

GIVEN, VECTORS = ("q", "k", "v", "g", "a", "b", "dout"), ("q", "k", "v", "a", "b")
Arrays = dict[str, Any]


def unsupported_reason(x: Inputs, plan: Plan) -> str | None:
    """Why the kernels do not compute the gradients of a call that the recurrence has computed; None if they do."""
    if not policy.RECURRENCE_BACKWARD:
        return "gradients token by token are off"
    if x.gv is not None or x.decay is Decay.SCALAR or (x.decay is Decay.NONE and x.erase is not Erase.FREE):
        return "the kernels are of decays of the key channels, and of free rank-one terms with such decays or none"
    if x.q is None or not plan.causal or x.q.shape[-2] > x.v.shape[-2]:
        return "the kernels have queries along the way, of no more heads than the values"
    if not policy.recurs_cuda(x, plan):
        return "float32 sequences of this length go by array calls: decays that are rounded at every token add up"
    before = plan.query_reads is not ReadState.UPDATED
    if before and x.erase is not Erase.NONE:
        return "queries that read before the write stand with no erase term"
    return None


def backward(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state: by the kernels, else by array calls."""
    if policy.is_short_cuda(saved.plan):
        return definition.backward(saved, dout, dstate)
    if unsupported_reason(saved.x, saved.plan) is None:
        return by_kernels(saved, dout, dstate)
    return array_calls.backward(array_calls.forward(saved.x, saved.plan, saved.state)[2], dout, dstate)


def by_kernels(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """The same by the kernels."""
    x, plan, state, _ = saved
    xp = plan.xp
    if isinstance(dstate, StatesAt):
        dstate = dstate.end
    dout = xp.zeros(x.v.shape, dtype=x.v.dtype) if dout is None else dout
    if x.erase is not Erase.DELTA:
        return _gradients(x, plan, state, dout, dstate)
    changed, decayed, beta = _as_free(x, plan)
    d, first = _gradients(changed, plan, state, dout, dstate)
    return _of_delta(x, plan, d, decayed, beta), first


def _as_free(x: Inputs, plan: Plan) -> tuple[Inputs, Array, Array]:
    """(the same call with a free rank-one term, e^g r, beta), in float32, of the heads of the values."""
    xp, heads = plan.xp, x.v.shape[-2]
    wide = {n: cast(xp, getattr(x, n), xp.float32) for n in ("q", "k", "v", "g", "r", "beta")}
    r, g, beta = (shared_heads(xp, wide[n], heads) for n in ("r", "g", "beta"))
    decayed = r * xp.exp(g) if plan.erase_reads is ReadState.DECAYED else r
    k = shared_heads(xp, wide["k"], heads)
    free = x._replace(q=wide["q"], k=k, v=beta * wide["v"], g=g, r=None, beta=None, a=-beta * decayed, b=k)
    return free, decayed, beta


def _of_delta(x: Inputs, plan: Plan, d: Inputs, decayed: Array, beta: Array) -> Inputs:
    """Gradients of the delta rule's inputs from the gradients of the free term's inputs."""
    xp = plan.xp
    before = plan.erase_reads is not ReadState.DECAYED
    da = -beta * d.a
    dr = da if before else da * xp.exp(shared_heads(xp, cast(xp, x.g, xp.float32), x.v.shape[-2]))
    dbeta = xp.sum(cast(xp, x.v, xp.float32) * d.v, axis=-1, keepdims=True)
    dbeta = dbeta - xp.sum(decayed * d.a, axis=-1, keepdims=True)
    dg = d.g if before else d.g + da * decayed
    grads = {"q": d.q, "k": d.k + d.b, "v": beta * d.v, "g": dg, "r": dr, "beta": dbeta}
    if plan.erases_key:
        grads["k"] = grads["k"] + grads.pop("r")
    return Inputs(**dict.fromkeys(Inputs._fields) | {n: shaped(xp, y, getattr(x, n)) for n, y in grads.items()})


def _gradients(x: Inputs, plan: Plan, state: Array | None, dout: Array, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of a call without an erase term or with erase FREE."""
    xp = plan.xp
    arrays, kind = _arrays(xp, x, plan, dout)
    (*lead, T, heads, V), K = x.v.shape, x.k.shape[-1]
    ragged, N, dense = plan.is_ragged, len(plan.sequences) if plan.is_ragged else prod(lead), (prod(lead), T, heads)
    start, last = (None if S is None else xp.ascontiguousarray(cast(xp, S, xp.float32)) for S in (state, dstate))
    first = xp.empty((N, heads, K, V) if ragged else (*lead, heads, K, V), dtype=xp.float32)
    longest = max(s.stop - s.start for s in plan.sequences)
    offsets = xp.asarray([0, *(s.stop for s in plan.sequences)], dtype=xp.int64) if ragged else None
    for n in VECTORS:
        y = arrays[n]
        arrays[f"d{n}"] = None if y is None else xp.empty((*dense, y.shape[-1]), dtype=y.dtype)
    arrays["dg"] = None if x.g is None else xp.empty((*dense, K), dtype=arrays["g"].dtype)
    outputs: dict[str, Any] = {"dots": xp.empty((*dense, K), dtype=xp.float32), "u": arrays["u"], "offsets": offsets}
    marks = cuts.marks(longest + (kind.erase or kind.before))
    outputs["marks"] = xp.empty((N * heads, marks, K, V), dtype=xp.float32)
    if kind.erase:
        outputs |= {n: xp.empty((*dense, V), dtype=xp.float32) for n in ("w", "dw")}
    sizes = {"T": T, "heads": heads, "scale": plan.scale, "marks_of_sequence": marks, "slots": N * heads}
    if kind.erase:
        _launch("values", kind, False, arrays, sizes, outputs | {"start": start})
    _launch("values", kind, True, arrays, sizes, outputs | {"start": last, "end": first})
    _launch("channels", kind, False, arrays, sizes, outputs | {"start": start})
    _launch("channels", kind, True, arrays, sizes, outputs | {"start": last})
    du = add_bonus(xp, arrays, plan.scale) if kind.bonus else None
    grads = {n: shaped(xp, arrays[f"d{n}"].reshape(*lead, T, heads, -1), getattr(x, n))
             for n in (*VECTORS, "g") if arrays[f"d{n}"] is not None}  # fmt: skip
    if du is not None:
        grads["u"] = sum_of_groups(xp, du, x.u.shape[-2])
    return Inputs(**dict.fromkeys(Inputs._fields) | grads), first


def add_bonus(xp: Any, arrays: Arrays, scale: float) -> Array:
    """du (heads, K); what the bonus adds to dq and dk is added: out_t has scale (q_t . u k_t) v_t."""
    wide = {n: cast(xp, arrays[n], xp.float32) for n in ("q", "k", "v", "dout", "dq", "dk")}
    heads = wide["v"].shape[-2]
    q, k, u = (shared_heads(xp, y, heads) for y in (wide["q"], wide["k"], arrays["u"]))
    own = scale * xp.sum(wide["dout"] * wide["v"], axis=-1, keepdims=True)
    for n, y in (("dq", k), ("dk", q)):
        arrays[n] = cast(xp, wide[n] + own * u * y, arrays[n].dtype)
    return xp.sum(own * q * k, axis=(0, 1))


def _arrays(xp: Any, x: Inputs, plan: Plan, dout: Array) -> tuple[Arrays, cuts.RecurrenceKind]:
    """The arrays as the kernels read them: rows of one dtype, contiguous, (B, T, heads, width)."""
    element = element_of(x)
    kind = x.v.dtype if element != "float32" else xp.float32
    found: Arrays = dict.fromkeys(GIVEN)
    for n in (*VECTORS, "dout"):
        y = dout if n == "dout" else getattr(x, n)
        found[n] = None if y is None else dense_rows(xp, cast(xp, y, kind))
    if x.g is not None:
        g = x.g if dtype_name(x.g) in ELEMENTS else cast(xp, x.g, xp.float32)
        found["g"] = dense_rows(xp, xp.broadcast_to(g, (*x.v.shape[:-2], *g.shape[-2:])))
    found["u"] = None if x.u is None else xp.ascontiguousarray(cast(xp, x.u, xp.float32))
    K, V, gate = x.k.shape[-1], x.v.shape[-1], "float32" if x.g is None else dtype_name(found["g"])
    wide = K % 4 == V % 4 == 0 and all(is_wide(y) for n, y in found.items() if n != "u" and y is not None)
    before = plan.query_reads is not ReadState.UPDATED
    return found, cuts.RecurrenceKind(K, V, element, gate, x.erase is Erase.FREE, before, x.u is not None, wide)


def _launch(name: str, kind: cuts.RecurrenceKind, back: bool, arrays: Arrays, sizes: Arrays, given: Arrays) -> None:
    """One traversal. given: arrays by the names of the struct."""
    kernel, heads = cuts.kernel(name, kind, back), sizes["heads"]
    rows = {n: y for n, y in arrays.items() if n != "u"}
    pointers = ("u", "w", "dw", "start", "end", "marks", "dots", "offsets")
    fields: Arrays = {n: rows_of(y, heads) for n, y in rows.items()} | {n: address(given.get(n)) for n in pointers}
    fields |= {n: sizes[n] for n in ("T", "heads", "scale", "marks_of_sequence")}
    fields["group_u"] = 1 if arrays["u"] is None else heads // arrays["u"].shape[0]
    named = tuple(y for y in (*rows.values(), *(given.get(n) for n in pointers)) if y is not None)
    kernel.launch(sizes["slots"] * kernel.parts, arguments.RECURRENCE.packed(fields), named)
