"""A twin of the gradients token by token (cuda_src/recurrence) in NumPy, which reads the bytes of their arguments."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from linattn_np.matrix_state.cuda.arguments import RECURRENCE
from linattn_np.matrix_state.cuda.recurrence import plan
from tests.matrix_state.cuda.step_twin import KINDS
from tests.matrix_state.cuda.vector_twin import _array, _view


class Call:
    """The arguments of a launch, by name."""

    def __init__(self, constants, arguments):
        self.c, self.a = SimpleNamespace(**dict(constants)), SimpleNamespace(**RECURRENCE.unpack(arguments))

    def sequence(self, n):
        """(batch row, first token in it, tokens, number of the first)."""
        if not self.a.offsets:
            return n, 0, self.a.T, n * self.a.T
        first, stop = _view(self.a.offsets + 8 * n, (2,), (8,), np.int64)
        return 0, first, stop - first, first

    def rows(self, name, n, head, width, kind):
        x, dtype, (row, first, T, _) = SimpleNamespace(**getattr(self.a, name)), KINDS[kind], self.sequence(n)
        if not x.data:
            return None
        at = x.data + row * x.batch + first * x.token + head // x.group * x.head
        return _view(at, (T, width), (x.token, dtype.itemsize), dtype)

    def dense(self, address, n, head, width, dtype=np.float32):
        """Rows of a sequence and head of an array (tokens, heads, width)."""
        _, _, T, first = self.sequence(n)
        size, heads = np.dtype(dtype).itemsize, self.a.heads
        return _view(address + (first * heads + head) * width * size, (T, width), (heads * width * size, size), dtype)

    def state(self, address, slot):
        K, V = self.c.LA_K, self.c.LA_V
        return _array(address + 4 * slot * K * V, K, V) if address else None

    def given(self, n, head):
        """All that a traversal reads, in float64; rows of e^g."""
        c = self.c
        found = {name: self.rows(name, n, head, c.LA_V if name in ("v", "dout") else c.LA_K, c.LA_DTYPE)
                 for name in ("q", "k", "v", "a", "b", "dout")}  # fmt: skip
        found = {name: None if x is None else x.astype(np.float64) for name, x in found.items()}
        g = self.rows("g", n, head, c.LA_K, c.LA_GATE)
        found["e"] = np.ones(found["k"].shape) if g is None else np.exp(g.astype(np.float64))
        found["dout"] = self.a.scale * found["dout"]
        u = _array(self.a.u, self.a.heads // self.a.group_u, c.LA_K) if c.LA_BONUS else None
        return SimpleNamespace(**found, u=None if u is None else u[head // self.a.group_u].astype(np.float64))


def run(entry, constants, arguments, blocks):
    """One launch."""
    call = Call(constants, arguments)
    parts = -(-call.c.LA_V // plan.COLUMNS) if entry == "values" else -(-call.c.LA_K // plan.LANES)
    assert blocks % (parts * call.a.heads) == 0
    which = {"values": (_corrections, _values_back), "channels": (_reads, _writes)}[entry][call.c.LA_BACK]
    for slot in range(blocks // parts):
        n, head = divmod(slot, call.a.heads)
        which(call, n, head, slot, call.given(n, head))


def _first(call, slot):
    S = call.state(call.a.start, slot)
    return np.zeros((call.c.LA_K, call.c.LA_V)) if S is None else S.astype(np.float64)


def _corrections(call, n, head, slot, x):
    S, w = _first(call, slot), call.dense(call.a.w, n, head, call.c.LA_V)
    for t in range(len(w)):
        w[t] = x.a[t] @ S
        S = x.e[t][:, None] * S + np.outer(x.k[t], x.v[t]) + np.outer(x.b[t], w[t])


def _values_back(call, n, head, slot, x):
    c, R = call.c, _first(call, slot)
    dv = call.rows("dv", n, head, c.LA_V, c.LA_DTYPE)
    dw = call.dense(call.a.dw, n, head, c.LA_V) if c.LA_ERASE else None
    for t in reversed(range(len(dv))):
        G = R if c.LA_BEFORE else R + np.outer(x.q[t], x.dout[t])
        dv[t] = x.k[t] @ G + (((x.q[t] * x.u * x.k[t]).sum() * x.dout[t]) if c.LA_BONUS else 0)
        R = x.e[t][:, None] * G
        if c.LA_BEFORE:
            R = R + np.outer(x.q[t], x.dout[t])
        if c.LA_ERASE:
            dw[t] = x.b[t] @ G
            R = R + np.outer(x.a[t], dw[t])
    call.state(call.a.end, slot)[:] = R


def _reads(call, n, head, slot, x):
    c, S = call.c, _first(call, slot)
    w, dw = ((call.dense(y, n, head, c.LA_V) if c.LA_ERASE else None) for y in (call.a.w, call.a.dw))
    dq, da = (call.rows(name, n, head, c.LA_K, c.LA_DTYPE) for name in ("dq", "da"))
    near = call.dense(call.a.near_dots, n, head, c.LA_K)
    marks = call.a.marks_of_sequence
    for t in range(len(dq)):
        if c.LA_ERASE:
            of_a = S @ dw[t]
            da[t] = of_a
            call.dense(call.a.far_dots, n, head, c.LA_K)[t] = x.a[t] * of_a
        if not c.LA_BEFORE:
            S = x.e[t][:, None] * S
        of_q, own = S @ x.dout[t], x.dout[t] @ x.v[t]
        if c.LA_BEFORE:
            S = x.e[t][:, None] * S
        near[t] = x.q[t] * of_q
        if (t + 1) % plan.MARK == 0 or t + 1 == len(dq):
            call.state(call.a.marks, slot * marks + t // plan.MARK)[:] = S
        dq[t] = of_q + own * x.k[t] * ((x.u if c.LA_BONUS else 0) if c.LA_BEFORE else 1)
        S = S + np.outer(x.k[t], x.v[t])
        if c.LA_ERASE:
            dq[t] = of_q + own * x.k[t] + (x.dout[t] @ w[t]) * x.b[t]
            S = S + np.outer(x.b[t], w[t])


def _writes(call, n, head, slot, x):
    c, R = call.c, _first(call, slot)
    w, dw = ((call.dense(y, n, head, c.LA_V) if c.LA_ERASE else None) for y in (call.a.w, call.a.dw))
    dk, db = (call.rows(name, n, head, c.LA_K, c.LA_DTYPE) for name in ("dk", "db"))
    dg = call.rows("dg", n, head, c.LA_K, c.LA_GATE)
    near, P, du = call.dense(call.a.near_dots, n, head, c.LA_K), None, np.zeros(c.LA_K)
    for t in reversed(range(len(dk))):
        marked = (t + 1) % plan.MARK == 0 or t + 1 == len(dk)
        if marked:
            P = (call.state(call.a.marks, slot * call.a.marks_of_sequence + t // plan.MARK) * R).sum(1)
        of_k, own = R @ x.v[t], x.dout[t] @ x.v[t]
        sum_, du = x.k[t] * of_k, du + own * x.q[t] * x.k[t]
        dk[t] = of_k + own * x.q[t] * ((x.u if c.LA_BONUS else 0) if c.LA_BEFORE else 1)
        if c.LA_ERASE:
            of_b = R @ w[t]
            sum_ = sum_ + x.b[t] * of_b
            db[t] = of_b + (x.dout[t] @ w[t]) * x.q[t]
        gate = np.where(x.e[t] == 0, 0, P - (0 if marked else sum_) + (0 if c.LA_BEFORE else near[t]))
        if dg is not None:
            dg[t] = gate
        P = gate + (near[t] if c.LA_BEFORE else call.dense(call.a.far_dots, n, head, c.LA_K)[t] if c.LA_ERASE else 0)
        R = x.e[t][:, None] * (R if c.LA_BEFORE else R + np.outer(x.q[t], x.dout[t]))
        if c.LA_BEFORE:
            R = R + np.outer(x.q[t], x.dout[t])
        if c.LA_ERASE:
            R = R + np.outer(x.a[t], dw[t])
    if c.LA_BONUS:
        _array(call.a.du + 4 * slot * c.LA_K, c.LA_K)[:] = du
