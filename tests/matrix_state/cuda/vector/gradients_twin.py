"""A twin of the backward kernels of a vector decay, token by token in NumPy on the bytes of their arguments: no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from linattn_np.matrix_state.cuda.arguments import (
    HEAD_SUMS,
    VECTOR_BONUS,
    VECTOR_GRADS,
    VECTOR_REVERSE,
    VECTOR_STRENGTHS,
)
from linattn_np.matrix_state.cuda.shared_memory import DELTA_END, TILE
from tests.matrix_state.cuda.vector.twin import MADE, STATE, C, _array, _betas, _Call, _mapped, _view, store_state

STRUCTS = {"reverse": VECTOR_REVERSE, "grads": VECTOR_GRADS, "bonus": VECTOR_BONUS, "strengths": VECTOR_STRENGTHS}


def load_state(address, number, size, K, V):
    return _view(address + number * size, (K, V), (8 * V, 8), np.float64).copy()


class _Backward(_Call):
    """The arguments of a launch, by name."""

    def __init__(self, entry, constants, arguments, narrow):
        self.constants = SimpleNamespace(**dict(constants))
        self.a = SimpleNamespace(**STRUCTS[entry].unpack(arguments))
        self.narrow = narrow

    def of(self, name, head, n, start, stop, width, dtype=None):
        """Tokens start .. stop of a sequence in an array of rows."""
        at, (row, first, _) = SimpleNamespace(**getattr(self.a, name)), self.sequence(n)
        size = np.dtype(dtype or self.narrow).itemsize
        data = at.data + row * at.batch + (first + start) * at.token + head // at.group * at.head
        return _view(data, (stop - start, width), (at.token, size), dtype or self.narrow)

    def gates(self, name, head, n, start, stop):
        dtype = np.float32 if self.constants.LA_GATE == 2 else self.narrow
        return self.of(name, head, n, start, stop, self.constants.LA_K, dtype)

    def box(self, name, head, n, start, stop, group=1):
        x, (row, first, _) = _mapped(getattr(self.a, name), self.narrow), self.sequence(n)
        return x[row, first + start : first + stop, head // group]


def run(entry, constants, blocks, arguments, narrow):
    """One launch."""
    call = _Backward(entry, constants, arguments, narrow)
    {"reverse": _reverse, "grads": _grads, "bonus": _bonus, "strengths": _strengths}[entry](call, blocks)


def _wide(*arrays):
    return [x.astype(np.float64) for x in arrays]


def _reverse(call, blocks):
    a, c = call.a, call.constants
    for block in range(blocks):
        slot, segment = divmod(block, a.segments)
        n, head = divmod(slot, a.heads)
        T = call.sequence(n)[2]
        last = max(-(-T // C) - 1, 0) // a.chunks
        start, stop = segment * a.chunks * C, min(T, (segment + 1) * a.chunks * C)
        if segment > last or (c.LA_ADDS and segment == 0):
            continue
        if c.LA_ADDS and c.LA_ERASE:
            G = call.state("start", slot // a.start_group, c.LA_K, c.LA_V) if segment == last else None
            G = np.zeros((c.LA_K, c.LA_V)) if G is None else G.astype(np.float64)
            number = slot * (a.segments - 1) + segment - 1
            added = _array(a.added, number + 1, *STATE)[number]
            added[:], added[: c.LA_V, : c.LA_K] = 0, _scan(call, n, head, start, stop, G)[0].T
            continue
        if c.LA_ADDS:
            G, D = _scan(call, n, head, start, stop, np.zeros((c.LA_K, c.LA_V)))
            number = slot * (a.segments - 1) + segment - 1
            added, sums = _array(a.added, number + 1, *STATE)[number], _array(a.sums, number + 1, 128)[number]
            added[:], sums[:] = 0, 1
            added[: c.LA_V, : c.LA_K], sums[: c.LA_K] = G.T, D
            continue
        if segment < last:
            G = _array(a.begins, (slot + 1) * a.segments, *STATE)[slot * a.segments + segment]
            G = G[: c.LA_V, : c.LA_K].T.astype(np.float64)
        else:
            G = call.state("start", slot // a.start_group, c.LA_K, c.LA_V)
            G = np.zeros((c.LA_K, c.LA_V)) if G is None else G.astype(np.float64)
        G = _scan(call, n, head, start, stop, G)[0]
        if segment == 0:
            call.state("end", slot, c.LA_K, c.LA_V)[:] = G


def _scan(call, n, head, start, stop, G):
    """(G before tokens start .. stop, their decay); dv, and G after every chunk."""
    a, c = call.a, call.constants
    q, dout = _wide(call.box("q", head, n, start, stop, a.group_q), call.box("dout", head, n, start, stop))
    g = call.gates("g", head, n, start, stop).astype(np.float64)
    k = call.box("k", head, n, start, stop, a.group_k).astype(np.float64) if c.LA_ERASE or not c.LA_ADDS else None
    dv = None if c.LA_ADDS else call.of("out", head, n, start, stop, c.LA_V)
    beta = _betas(MADE[a.inverses], n, head, start, stop) if c.LA_ERASE else None
    v = call.box("v", head, n, start, stop, a.group_v).astype(np.float64) if c.LA_ERASE else None
    for t in range(stop - start - 1, -1, -1):
        if not c.LA_ADDS and ((start + t) % C == C - 1 or t == stop - start - 1):
            store_state(a.ends, call.block(n, head) + (start + t) // C, c.LA_ENDS, G)
        read = a.scale * np.outer(q[t], dout[t])
        if not c.LA_BEFORE:
            G = G + read
        if c.LA_ADDS and c.LA_ERASE:
            G = G - np.outer(k[t], beta[t] * (k[t] @ G))
        elif not c.LA_ADDS:
            number = call.block(n, head) + (start + t) // C
            own = _view(a.grams + number * c.LA_GRAM, (C,), (8,), np.float64)[(start + t) % C] if c.LA_BONUS else 0.0
            new = (1 if beta is None else beta[t]) * (k[t] @ G + a.scale * own * dout[t])
            dv[t] = new
            if c.LA_ERASE:
                G = G - np.outer(k[t], new)
                _dots(call, number)[(start + t) % C] = new @ v[t]
        G = np.exp(g[t])[:, None] * G
        if c.LA_BEFORE:
            G = G + read
    return G, np.exp(g.sum(0))


def _dots(call, number):
    """dW.v of the tokens of a chunk, behind its G."""
    return _view(call.a.ends + number * call.constants.LA_ENDS + DELTA_END, (C,), (4,), np.float32)


def _grads(call, blocks):
    a, c = call.a, call.constants
    halves = -(-c.LA_K // 64)
    flags = _array(a.flags, a.items, dtype=np.int32)
    if c.LA_EXACT:
        assert not flags.any()
        return
    assert blocks == a.items
    for item in range(0, blocks, halves):
        flags[item : item + halves] = 0
        head, rest = item // halves % a.heads, item // halves // a.heads
        n, chunk = divmod(rest, a.chunks)
        T = call.sequence(n)[2]
        if chunk * C < T:
            _chunk(call, n, head, chunk, chunk * C, min(T, chunk * C + C))


def _chunk(call, n, head, chunk, start, stop):
    a, c = call.a, call.constants
    K, V, number = c.LA_K, c.LA_V, call.block(n, head) + chunk
    q, k = _wide(*(call.of(name, head, n, start, stop, K) for name in "qk"))
    g, v, dout = _wide(call.gates("g", head, n, start, stop), call.box("v", head, n, start, stop, a.group_v),
                       call.box("dout", head, n, start, stop))  # fmt: skip
    dq = call.of("dq", head, n, start, stop, K, np.float32 if getattr(c, "LA_DQ", 0) == 2 else None)
    complement = getattr(c, "LA_COMPLEMENT", 0)
    dk = np.empty((stop - start, K)) if complement else call.of("dk", head, n, start, stop, K)
    dg = call.gates("dg", head, n, start, stop)
    new = _view(a.new_values + number * TILE, v.shape, (8 * V, 8), np.float64) if c.LA_ERASE else v  # v: of dW
    S, before = load_state(a.states, number, c.LA_END, K, V), []
    u = _array(a.u, head // a.group_u + 1, K)[-1].astype(np.float64) if c.LA_BONUS else np.zeros(K)
    for t in range(stop - start):
        before.append(S)
        S = np.exp(g[t])[:, None] * S + np.outer(k[t], new[t])
    G, du = load_state(a.ends, number, c.LA_ENDS, K, V), np.zeros(K)
    for t in range(stop - start - 1, -1, -1):
        d = a.scale * dout[t]
        own = (d @ new[t]) * u
        dq[t] = (before[t] if c.LA_BEFORE else S) @ d + own * k[t]
        if not c.LA_BEFORE:
            G = G + np.outer(q[t], d)
        r = -np.exp(g[t]) * (before[t] @ v[t]) if c.LA_ERASE else 0.0
        dk[t] = G @ new[t] + own * q[t] + r
        if c.LA_ERASE:
            G = G - np.outer(k[t], v[t])
            _add_erase_dots(call, n, head, start + t, r * k[t])
        dg[t] = np.exp(g[t]) * (G * before[t]).sum(1) - (np.exp(g[t]) * dk[t] if complement else 0.0)
        G = np.exp(g[t])[:, None] * G
        if c.LA_BEFORE:
            G = G + np.outer(q[t], d)
        du += (d @ new[t]) * q[t] * k[t]
        S = before[t]
    if c.LA_BONUS:
        _array(a.du, number + 1, K)[-1] = du


def _add_erase_dots(call, n, head, t, products):
    a, (row, first, _) = call.a, call.sequence(n)
    sums = _array(a.erase_dots, -(-len(products) // 64), a.heads, a.tokens)
    for half in range(len(sums)):
        sums[half, head, row * a.T + first + t] = products[64 * half : 64 * half + 64].sum()


def _strengths(call, blocks):
    a, K = call.a, call.constants.LA_K
    assert blocks == -(-a.items // 4)
    sums = _array(a.erase_dots, -(-K // 64), a.heads, a.tokens).sum(0)
    dbeta = _array(a.dbeta, a.tokens, a.heads)
    for n in range(a.items // a.heads // a.chunks):
        row, first, T = call.sequence(n)
        for head in range(a.heads):
            beta = np.maximum(_betas(call, n, head, 0, T), 1e-8)
            dots = [_dots(call, call.block(n, head) + chunk) for chunk in range(-(-T // C))]
            index = row * a.T + first
            found = np.concatenate(dots)[:T] if dots else np.zeros(0)
            dbeta[index : index + T, head] = (found + sums[head, index : index + T]) / beta


def _bonus(call, blocks):
    a, K = call.a, call.constants.LA_K
    parts, du = _array(a.parts, a.heads * a.slots, K), _array(a.du, a.heads, K)
    assert blocks == a.heads * -(-K // 32)
    du[:] = 0
    for head in range(a.heads):
        for n in range(a.sequences):
            first = call.block(n, head)
            du[head] += parts[first : first - (-call.sequence(n)[2] // C)].sum(0)


def head_sums(arguments, narrow):
    """Rows summed over neighbouring heads."""
    a = SimpleNamespace(**HEAD_SUMS.unpack(arguments))
    rows, width = a.pieces // a.row, 8 * a.row
    x, y = _array(a.x, rows, a.group, width, dtype=narrow), _array(a.y, rows, width, dtype=narrow)
    y[:] = x.astype(np.float64).sum(1)
