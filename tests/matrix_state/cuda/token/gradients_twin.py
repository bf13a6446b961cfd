"""A twin of the gradients token by token (cuda_src/token) in NumPy, which reads the bytes of their arguments."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from linattn_np.matrix_state.cuda.arguments import RECURRENCE
from linattn_np.matrix_state.cuda.token import gradients_plan as plan
from tests.matrix_state.cuda.step_twin import KINDS
from tests.matrix_state.cuda.vector.twin import _array, _view


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


def _counted(call, n, head, x):
    """(q, dO, a, dw) counted with tokens -1 .. T - 1, of which the first is not there where no reader is early."""
    c, (T, K), V = call.c, x.k.shape, call.c.LA_V
    early = bool(c.LA_BEFORE or c.LA_ERASE)
    before = lambda y: np.concatenate([np.zeros((1, y.shape[1])), y])  # noqa: E731
    after = lambda y: np.concatenate([y, np.zeros((1, y.shape[1]))])  # noqa: E731
    q, dout = ((after if c.LA_BEFORE else before)(y) for y in (x.q, x.dout))
    a, dw = (after(x.a), after(call.dense(call.a.dw, n, head, V))) if c.LA_ERASE else (np.zeros((T + 1, K)),
                                                                                     np.zeros((T + 1, V)))  # fmt: skip
    w = before(call.dense(call.a.w, n, head, V)) if c.LA_ERASE else np.zeros((T + 1, V))
    writers = {name: before(y) for name, y in (("k", x.k), ("v", x.v), ("b", np.zeros((T, K)) if x.b is None else x.b))}
    e = np.concatenate([np.ones((1, K)), x.e])
    found = SimpleNamespace(q=q, dout=dout, a=a, dw=dw, w=w, e=e, **writers)
    return found, range(0 if early else 1, T + 1)


def _is_mark(call, i, T):
    """Whether the token of row i ends a mark's tokens, and which mark."""
    early = int(bool(call.c.LA_BEFORE or call.c.LA_ERASE))
    at = i - 1 + early  # tokens before it
    return (at + 1) % plan.MARK == 0 or i == T, at // plan.MARK


def _reads(call, n, head, slot, x):
    c, S = call.c, _first(call, slot)
    dq, da = (call.rows(name, n, head, c.LA_K, c.LA_DTYPE) for name in ("dq", "da"))
    dots, (x, tokens) = call.dense(call.a.dots, n, head, c.LA_K), _counted(call, n, head, x)
    for i in tokens:
        S = x.e[i][:, None] * S
        marked, mark = _is_mark(call, i, len(dq))
        if marked:
            call.state(call.a.marks, slot * call.a.marks_of_sequence + mark)[:] = S
        of_q, of_a = S @ x.dout[i], S @ x.dw[i]
        if (to := i - 1 + c.LA_BEFORE) in range(len(dq)):
            dq[to] = of_q + (x.dout[i] @ x.v[i]) * x.k[i] + (x.dout[i] @ x.w[i]) * x.b[i]
        if c.LA_ERASE and i < len(dq):
            da[i] = of_a + (x.dw[i] @ x.v[i]) * x.k[i] + (x.dw[i] @ x.w[i]) * x.b[i]
        if i:
            dots[i - 1] = x.q[i] * of_q + x.a[i] * of_a
        S = S + np.outer(x.k[i], x.v[i]) + np.outer(x.b[i], x.w[i])


def _writes(call, n, head, slot, x):
    c, R = call.c, _first(call, slot)
    dk, db = (call.rows(name, n, head, c.LA_K, c.LA_DTYPE) for name in ("dk", "db"))
    dg, P = call.rows("dg", n, head, c.LA_K, c.LA_GATE), None
    dots, (x, tokens) = call.dense(call.a.dots, n, head, c.LA_K), _counted(call, n, head, x)
    for i in reversed(tokens):
        marked, mark = _is_mark(call, i, len(dk))
        of_k, of_b = R @ x.v[i], R @ x.w[i]
        if marked:
            P = (call.state(call.a.marks, slot * call.a.marks_of_sequence + mark) * R).sum(1)
        else:
            P = P - x.k[i] * of_k - x.b[i] * of_b
        if i:
            dk[i - 1] = of_k + (x.dout[i] @ x.v[i]) * x.q[i] + (x.dw[i] @ x.v[i]) * x.a[i]
            P = np.where(x.e[i] == 0, 0, P + dots[i - 1])
            if c.LA_ERASE:
                db[i - 1] = of_b + (x.dout[i] @ x.w[i]) * x.q[i] + (x.dw[i] @ x.w[i]) * x.a[i]
            if dg is not None:
                dg[i - 1] = P
        R = x.e[i][:, None] * (R + np.outer(x.q[i], x.dout[i]) + np.outer(x.a[i], x.dw[i]))
