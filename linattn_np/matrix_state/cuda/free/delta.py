"""The delta rule with erase vectors of its own and a decay of the key channels, by the kernels of erase FREE.

    S_t = diag(e^{g_t}) S_{t-1} + k_t^T beta_t (v_t - r_t diag(e^{g_t}) S_{t-1})
    a_t = -beta_t e^{g_t} r_t,  b_t = k_t,  values beta_t v_t          without e^{g_t} where r reads S_{t-1}

One kernel makes a and the values, another maps the gradients back (free/erase_vectors.cu).
"""

from __future__ import annotations

from math import prod
from typing import Any

from ....ops.cuda.arguments import address, rows_of
from ....ops.sums import added, sum_of_groups
from ....runtime.arrays import Array, cast, dtype_name
from ....runtime.cuda import launch
from ....runtime.cuda.elements import ELEMENTS, Constants
from ... import policy
from ...types import Decay, Erase, Inputs, Plan, ReadState, Saved
from .. import arguments
from ..vector import launch as launches
from . import calls

SOURCE, WARPS = "free/erase_vectors.cu", policy.ROW_WARPS
GATES = ("bfloat16", "float32")


def unsupported_reason(x: Inputs, plan: Plan) -> str | None:
    """Why the kernels do not cover a call with erase vectors of its own; None where they do."""
    if x.erase is not Erase.DELTA or x.decay is not Decay.VECTOR:
        return "the kernels are of the delta rule with a decay of the key channels"
    heads = x.v.shape[-2]
    if x.g.shape[:-1] != x.v.shape[:-1] or heads % x.r.shape[-2] or heads % x.beta.shape[-2]:
        return "log decays, erase vectors or strengths are not of the heads of the values"
    if dtype_name(x.r) not in GATES or dtype_name(x.g) not in GATES or dtype_name(x.beta) != "float32":
        return "the kernels take erase vectors and log decays in bfloat16 or float32, strengths in float32"
    return calls.unsupported_reason(_free(x, x.r, x.v), plan)


unsupported_gradients = unsupported_reason


def how(x: Inputs, plan: Plan) -> str:
    """The kernels of a call that is covered, in words."""
    return f"as a free rank-one term: {calls.how(x, plan)}"


def handles(x: Inputs, plan: Plan) -> frozenset[str]:
    """The preprocessing steps that the kernels include."""
    return calls.handles(x, plan)


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved)."""
    out, end, inner = calls.forward(_changed(x, plan), plan, state)
    return out, end, Saved(x, plan, state, inner)


def backward(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    x, plan, state, inner = saved
    xp = plan.xp
    inner = Saved(_changed(x, plan), plan, state, None) if inner is None else inner
    d, first = calls.backward(inner, dout, dstate)
    shape, one_each = x.v.shape[:-1], x.k.shape[-2] == x.v.shape[-2]
    dg, db = (xp.ascontiguousarray(y) for y in (d.g, d.b))
    dk = xp.ascontiguousarray(d.k) if one_each else added(xp, cast(xp, d.k, plan.dtype), cast(xp, db, plan.dtype))
    dr, dv = xp.empty((*shape, x.r.shape[-1]), dtype=x.r.dtype), xp.empty(x.v.shape, dtype=x.v.dtype)
    dbeta = xp.empty((*shape, 1), dtype=xp.float32)
    more = {"dk": dk, "db": db} if one_each else {}
    _launch(
        "erase_vectors_vjp",
        x,
        plan,
        a=xp.ascontiguousarray(d.a),
        values=xp.ascontiguousarray(d.v),
        dg=dg,
        dr=dr,
        dv=dv,
        dbeta=dbeta,
        **more,
    )
    dr, dbeta = (y if y.shape[-2] == like.shape[-2] else sum_of_groups(xp, cast(xp, y, plan.dtype), like.shape[-2])
                 for y, like in ((dr, x.r), (dbeta, x.beta)))  # fmt: skip
    none = dict.fromkeys(Inputs._fields)
    return Inputs(**none | {"q": d.q, "k": dk, "v": dv, "g": dg, "r": dr, "beta": dbeta}), first


def constants(K: int, V: int, gate: str, erasers: str, before: bool) -> Constants:
    """The constants of erase_vectors.cu; erasers: dtype of the erase vectors; before: they read the undecayed state."""
    return (("LA_BEFORE", int(before)), ("LA_DTYPE", 0), ("LA_ERASERS", ELEMENTS[erasers]), ("LA_GATE", ELEMENTS[gate]),
            ("LA_K", K), ("LA_V", V))  # fmt: skip


def _free(x: Inputs, a: Array, values: Array) -> Inputs:
    return x._replace(v=values, r=None, beta=None, a=a, b=x.k)


def _changed(x: Inputs, plan: Plan) -> Inputs:
    """The inputs of the call with erase FREE."""
    values = plan.xp.empty(x.v.shape, dtype=x.v.dtype)
    a = plan.xp.empty((*x.v.shape[:-1], x.k.shape[-1]), dtype=x.v.dtype)
    _launch("erase_vectors", x, plan, a=a, values=values)
    return _free(x, a, values)


def _launch(entry: str, x: Inputs, plan: Plan, **given: Array) -> None:
    """given: arrays by the names of the struct, of the heads of the values."""
    (*lead, T, heads, V), K = x.v.shape, x.k.shape[-1]
    rows = {n: launches.row_array(getattr(x, n)) for n in ("r", "g", "v")}
    fields: dict[str, Any] = dict.fromkeys(("dg", "dr", "dv", "dk", "db", "dbeta"), 0)
    fields |= {n: rows_of(y, heads) for n, y in rows.items()} | {n: address(y) for n, y in given.items()}
    fields |= {"beta": arguments.gate_of(x.beta, heads), "rows": prod(lead) * T * heads, "T": T, "heads": heads}
    before = plan.erase_reads is not ReadState.DECAYED
    built = constants(K, V, dtype_name(x.g), dtype_name(x.r), before)
    launch.launch(
        SOURCE,
        entry,
        built,
        -(-fields["rows"] // WARPS),
        32 * WARPS,
        0,
        arguments.ERASE_VECTORS.packed(fields),
        (*rows.values(), x.beta, *given.values()),
    )
