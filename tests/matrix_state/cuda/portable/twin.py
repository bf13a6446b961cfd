"""A twin of the portable chunks of a vector decay (cuda_src/portable) in NumPy: token by token."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from linattn_np.matrix_state.cuda.arguments import VECTOR_PORTABLE
from tests.matrix_state.cuda.token import gradients_twin as twin


class Call(twin.Call):
    """The arguments of a launch, by name; a free term is not there."""

    def __init__(self, constants, arguments):
        no_rows = {"data": 0, "batch": 0, "token": 0, "head": 0, "group": 1}
        nothing = dict.fromkeys(("a", "b", "da", "db"), no_rows)
        self.c = SimpleNamespace(**dict(constants))
        self.a = SimpleNamespace(**nothing | VECTOR_PORTABLE.unpack(arguments))


def run(entry, constants, arguments, blocks):
    """One launch."""
    call = Call(constants, arguments)
    if entry == "bonus":
        return add_bonus(call, blocks)
    parts = -(-(call.c.LA_V if entry == "values" else call.c.LA_K) // (16 * call.c.LA_WARPS))
    assert blocks % (parts * call.a.heads) == 0
    plain = {"values": (forward, twin._values_back), "channels": (twin._reads, twin._writes)}
    erasing = {"values": (forward, erase_back), "channels": (erase_reads, erase_writes)}
    which = (erasing if call.c.LA_ERASE else plain)[entry][call.c.LA_BACK]
    for slot in range(blocks // parts):
        n, head = divmod(slot, call.a.heads)
        which(call, n, head, slot, given(call, n, head))


def given(call, n, head):
    """All that a pass reads, in float64; without a cotangent zeros."""
    if not call.a.dout["data"]:
        x, call.a.dout = call.a.dout, call.a.v
        found = call.given(n, head)
        call.a.dout = x
    else:
        found = call.given(n, head)
    if call.c.LA_ERASE:
        found.beta = call.rows("beta", n, head, 1, 2).astype(np.float64)
        found.error, found.du = (call.rows(name, n, head, call.c.LA_V, 2) for name in ("error", "du"))
    return found


def forward(call, n, head, slot, x):
    c, S = call.c, twin._first(call, slot)
    out = call.rows("out", n, head, c.LA_V, c.LA_DTYPE)
    for t in range(len(x.q)):
        own = (x.q[t] * x.u * x.k[t]).sum() if c.LA_BONUS else 0
        before, S = S, x.e[t][:, None] * S
        written = x.v[t]
        if c.LA_ERASE:
            error = x.v[t] - x.k[t] @ S
            written = x.beta[t] * error
            if x.error is not None:
                x.error[t] = error
        S = S + np.outer(x.k[t], written)
        if out is not None:
            out[t] = call.a.scale * (x.q[t] @ (before if c.LA_BEFORE else S) + own * x.v[t])
    if call.a.end:
        call.state(call.a.end, slot)[:] = S


def erase_back(call, n, head, slot, x):
    R, dv = twin._first(call, slot), call.rows("dv", n, head, call.c.LA_V, call.c.LA_DTYPE)
    for t in reversed(range(len(dv))):
        G = R + np.outer(x.q[t], x.dout[t])
        x.du[t] = x.k[t] @ G
        own = x.beta[t] * (x.k[t] @ G)
        dv[t], R = own, x.e[t][:, None] * (G - np.outer(x.k[t], own))
    call.state(call.a.end, slot)[:] = R


def erase_reads(call, n, head, slot, x):
    c, S = call.c, twin._first(call, slot)
    dq = call.rows("dq", n, head, c.LA_K, c.LA_DTYPE)
    dots, dr, dbeta = (call.dense(getattr(call.a, name), n, head, width)
                       for name, width in (("dots", c.LA_K), ("dr", c.LA_K), ("dbeta", 1)))  # fmt: skip
    for t in range(len(dq)):
        S = x.e[t][:, None] * S
        if (t + 1) % c.LA_MARK == 0 or t + 1 == len(dq):
            call.state(call.a.marks, slot * call.a.marks_of_sequence + t // c.LA_MARK)[:] = S
        dr[t] = -S @ (x.beta[t] * x.du[t])
        dots[t] = x.q[t] * (S @ x.dout[t]) + x.k[t] * dr[t]
        S = S + np.outer(x.k[t], x.beta[t] * x.error[t])
        dq[t], dbeta[t] = S @ x.dout[t], x.du[t].astype(np.float64) @ x.error[t]


def erase_writes(call, n, head, slot, x):
    c, R, P = call.c, twin._first(call, slot), None
    dk, dg = call.rows("dk", n, head, c.LA_K, c.LA_DTYPE), call.rows("dg", n, head, c.LA_K, c.LA_GATE)
    dots, dr = (call.dense(getattr(call.a, name), n, head, c.LA_K) for name in ("dots", "dr"))
    for t in reversed(range(len(dk))):
        of_k = R @ (x.beta[t] * x.error[t])
        if (t + 1) % c.LA_MARK == 0 or t + 1 == len(dk):
            P = (call.state(call.a.marks, slot * call.a.marks_of_sequence + t // c.LA_MARK) * R).sum(1)
        else:
            P = P - x.k[t] * of_k
        P = np.where(x.e[t] == 0, 0, P + dots[t])
        dg[t], dk[t] = P, of_k + (x.dout[t] @ (x.beta[t] * x.error[t])) * x.q[t] + dr[t]
        R = x.e[t][:, None] * (R + np.outer(x.q[t], x.dout[t]) - np.outer(x.k[t], x.beta[t] * x.du[t]))


def add_bonus(call, blocks):
    c, a = call.c, call.a
    tokens, heads, T = a.tokens, a.heads, a.T
    assert blocks == -(-tokens // c.LA_TOKENS) * heads
    parts = twin._array(a.parts, blocks, c.LA_K)
    parts[:], c.LA_BONUS, a.offsets = 0, 1, 0
    for head in range(heads):
        for n in range(tokens // T):
            x = call.given(n, head)
            own = (x.dout * x.v).sum(1, keepdims=True)
            for name, other in (("dq", x.k), ("dk", x.q)):
                d = call.rows(name, n, head, c.LA_K, c.LA_DTYPE)
                d[:] = d + own * x.u * other
            for t in range(T):
                parts[(n * T + t) // c.LA_TOKENS * heads + head] += own[t] * x.q[t] * x.k[t]
