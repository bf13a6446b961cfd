"""A twin of the kernels of a vector decay that reads the bytes of their arguments, token by token in NumPy: no GPU."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace

import numpy as np

from linattn_np.matrix_state.cuda.arguments import DELTA, VECTOR
from linattn_np.matrix_state.cuda.shared_memory import (
    TILE,
    TRANSFER,
    VECTOR_HANDED,
    VECTOR_INVERSE,
    vector_gram,
    vector_state,
)

MAP = struct.Struct("<Q4q4qI")  # data, shape, strides, bytes of an element
C, STATE = 64, (128, 128)
MADE = {}  # by the address of factors and of A: the launch that has made them, of whose keys, decays and beta they are


def tensor_map(x, steps=1):
    """What stands for the driver's map: where an array lies, and how."""
    return MAP.pack(x.data.ptr, *x.shape, *x.strides, x.itemsize).ljust(128, b"\0")


def _view(address, shape, strides, dtype):
    if 0 in shape:
        return np.empty(shape, dtype)
    span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    raw = np.frombuffer((ctypes.c_uint8 * int(span)).from_address(int(address)), np.uint8)
    return np.ndarray(shape, dtype, buffer=raw.data, strides=strides)


def _mapped(data, narrow):
    """The array of a map; 16-bit elements are of dtype `narrow`."""
    address, *numbers, size = MAP.unpack(data[: MAP.size])
    return _view(address, tuple(numbers[:4]), tuple(numbers[4:]), narrow if size == 2 else np.float32)


def _array(address, *shape, dtype=np.float32):
    strides = np.cumprod((np.dtype(dtype).itemsize, *shape[:0:-1]))[::-1]
    return _view(address, shape, tuple(map(int, strides)), dtype) if address else None


def store_state(address, number, size, S):
    """S (K, V) of a chunk as float64, which fits for small K and V where the kernels have 128 x 128 of 16 bits."""
    S = np.ascontiguousarray(S, dtype=np.float64)
    assert S.nbytes <= size
    _view(address + number * size, (S.nbytes,), (1,), np.uint8)[:] = S.reshape(-1).view(np.uint8)


def store_rows(address, number, row, new):
    """Row of the new values of a chunk, as float64."""
    assert 8 * C * len(new) <= TILE
    _view(address + number * TILE + 8 * len(new) * row, new.shape, (8,), np.float64)[:] = new


class _Call:
    """The arguments of a launch, by name."""

    def __init__(self, constants, arguments, narrow):
        self.constants = SimpleNamespace(**dict(constants))
        self.a = SimpleNamespace(**VECTOR.unpack(arguments))
        self.narrow = narrow

    def sequence(self, n):
        """(batch row, first token, tokens)."""
        if not self.a.offsets:
            return n, 0, self.a.T
        return 0, *(lambda first, stop: (first, stop - first))(*_view(self.a.offsets + 8 * n, (2,), (8,), np.int64))

    def block(self, n, head):
        """Number of a sequence's first chunk."""
        a, first = self.a, self.sequence(n)[1]
        return head * a.slots + (first // C + n if a.offsets else n * -(-a.T // C))

    def rows(self, name, head, n, start, stop):
        """Rows of tokens start .. stop of a sequence, of the head that `head` shares."""
        x, (row, first, _) = _mapped(getattr(self.a, name), self.narrow), self.sequence(n)
        return x[row, first + start : first + stop, head // getattr(self.a, f"group_{name}", 1)]

    def state(self, name, slot, K, V):
        at = SimpleNamespace(**getattr(self.a, name))
        strides = (4 * at.column, 4 * at.row)
        return _view(at.data + 4 * at.slot * slot, (K, V), strides, np.float32) if at.data else None

    def begin(self, n, head, segment):
        """S before a segment: (K, V)."""
        a, K, V = self.a, self.constants.LA_K, self.constants.LA_V
        slot = n * a.heads + head
        if segment:
            begins = _array(a.begins, (slot + 1) * a.segments, *STATE)
            return begins[slot * a.segments + segment, :V, :K].T.astype(np.float64)
        start = self.state("start", slot // a.start_group, K, V)
        return np.zeros((K, V)) if start is None else start.astype(np.float64)


def run(file, entry, constants, blocks, arguments, narrow):
    """One launch."""
    if file.startswith("delta/"):
        _multiply(DELTA.unpack(arguments), blocks, dict(constants)["LA_REVERSE"], dict(constants)["LA_K"])
        return
    call = _Call(constants, arguments, narrow)
    a = call.a
    if entry == "segments":
        for slot in range(blocks // 16):
            _segments(call, slot)
        return
    if entry == "inverse":
        _inverse(call, blocks)
        return
    pieces = a.segments - (entry in ("adds", "transfers"))
    if entry == "scan":  # shares of equally long traversals, whose states are handed over
        share, chunks, rest = a.steps, a.chunks, a.more
        whole = (share, rest) == (chunks, 0)
        assert whole or (share >= chunks and not a.offsets)
        assert whole or (a.segments == 1 and not call.constants.LA_EXACT)
        assert whole or _array(a.handed, blocks, VECTOR_HANDED, dtype=np.int8) is not None
        blocks = (share * blocks + rest) // chunks
    assert blocks % pieces == 0
    for block in range(blocks):
        slot, segment = divmod(block, pieces)
        n, head = divmod(slot, a.heads)
        T = call.sequence(n)[2]
        last = max(-(-T // C) - 1, 0) // a.chunks
        start, stop = segment * a.chunks * C, min(T, (segment + 1) * a.chunks * C)
        if entry == "adds" and segment < last:
            _adds(call, n, head, segment, start, stop)
        if entry == "transfers" and segment < last:
            _transfers(call, n, head, segment, start, stop)
        if entry in ("scan", "chain") and segment <= last:
            _scan(call, n, head, segment, start, stop, segment == last)


def _tokens(call, n, head, start, stop, names="kvg"):
    return (call.rows(name, head, n, start, stop).astype(np.float64) for name in names)


def _adds(call, n, head, segment, start, stop):
    a, S, D = call.a, np.zeros((call.constants.LA_K, call.constants.LA_V)), np.ones(call.constants.LA_K)
    for k, v, g in zip(*_tokens(call, n, head, start, stop), strict=True):
        S, D = np.exp(g)[:, None] * S + np.outer(k, v), D * np.exp(g)
    number = (n * a.heads + head) * (a.segments - 1) + segment
    added, decays = _array(a.added, number + 1, *STATE)[number], _array(a.decays, number + 1, 128)[number]
    added[:], decays[:] = 0, 1
    added[: S.shape[1], : S.shape[0]], decays[: len(D)] = S.T, D


def _segments(call, slot):
    a, K, V = call.a, call.constants.LA_K, call.constants.LA_V
    n, head = divmod(slot, a.heads)
    S, begins = call.begin(n, head, 0), _array(a.begins, (slot + 1) * a.segments, *STATE)
    last, reverse = max(-(-call.sequence(n)[2] // C) - 1, 0) // a.chunks, call.constants.LA_REVERSE
    for segment in reversed(range(last)) if reverse else range(last):
        number = slot * (a.segments - 1) + segment
        added, decays = _array(a.added, number + 1, *STATE)[number], _array(a.decays, number + 1, 128)[number]
        S = decays[:K, None] * S + added[:V, :K].T
        begins[slot * a.segments + segment + (not reverse)] = 0
        begins[slot * a.segments + segment + (not reverse), :V, :K] = S.T


def _transfers(call, n, head, segment, start, stop):
    """S -> M^T S + added: of the first segment the state after it, of the others from zeros; M from the identity."""
    a, keys, K, V = call.a, MADE[call.a.factors], call.constants.LA_K, call.constants.LA_V
    S, M = call.begin(n, head, 0) if segment == 0 else np.zeros((K, V)), np.eye(K)
    beta = _betas(keys, n, head, start, stop)
    found = (*_tokens(keys, n, head, start, stop, "kg"), *_tokens(call, n, head, start, stop, "v"))
    for k, g, v, b in zip(*found, beta, strict=True):
        S, M = np.exp(g)[:, None] * S, np.exp(g)[:, None] * M
        S, M = S + np.outer(k, b * (v - k @ S)), M - np.outer(k, b * (k @ M))
    number = (n * a.heads + head) * (a.segments - 1) + segment
    added = _array(a.added, number + 1, *STATE)[number]
    added[:] = 0
    added[:V, :K] = S.T
    store_state(a.transfers, number, TRANSFER, M.T)


def _multiply(a, blocks, reverse, K):
    """begin(s + 1) = begin(s) M_s + added(s), value row by key column; or from the last segment down, by M_s^T."""
    a = SimpleNamespace(**a)
    assert not a.offsets
    last, inner = max(-(-a.T // C) - 1, 0) // a.chunks, a.segments - 1
    for slot in range(blocks // 8):
        begins, S = _array(a.begins, (slot + 1) * a.segments, *STATE), 0
        for n in range(last):
            s = last - n if reverse else n
            number = slot * inner + s
            added = _array(a.added, number + 1 - reverse, *STATE)[number - reverse]
            S, old = added.astype(np.float64), S
            if n:
                M = _view(a.transfers + number * TRANSFER, (K, K), (8 * K, 8), np.float64)
                S[:, :K] += old[:, :K] @ (M.T if reverse else M)
            begins[slot * a.segments + s + (-1 if reverse else 1)] = S


def _inverse(call, blocks):
    """Marks the chunks that have an inverse."""
    a = call.a
    MADE[a.factors] = MADE[a.inverses] = call
    pieces = a.segments * a.chunks
    for slot in range(blocks // pieces):
        n, head = divmod(slot, a.heads)
        for chunk in range(-(-call.sequence(n)[2] // C)):
            _array(a.inverses, call.block(n, head) + chunk + 1, VECTOR_INVERSE, dtype=np.int8)[-1] = 1


def _scan(call, n, head, segment, start, stop, is_last):
    a, c = call.a, call.constants
    number = (n * a.heads + head) * a.segments + segment
    if hasattr(c, "LA_EXACT"):  # a scan, whose heads are flagged
        flags = _array(a.flags, number + 1, 2, dtype=np.int32)[number]
        if c.LA_EXACT:
            assert not flags.any()
            return
        flags[:] = 0
    S, out = call.begin(n, head, segment), call.rows("out", head, n, start, stop)
    bonus, before = getattr(c, "LA_BONUS", 0), getattr(c, "LA_BEFORE", 0)
    u = _array(a.u, head // a.group_u + 1, c.LA_K)[-1].astype(np.float64) if bonus else 0.0
    beta = _betas(call, n, head, start, stop)
    for t, (q, k, v, g) in enumerate(zip(*_tokens(call, n, head, start, stop, "qkvg"), strict=True)):
        if getattr(c, "LA_KEEP", 0) and t % C == 0:
            store_state(a.states, call.block(n, head) + (start + t) // C, vector_state(beta is not None), S)
        if getattr(c, "LA_KEEP", 0):  # of P the bonus on its diagonal
            number = call.block(n, head) + (start + t) // C
            P = _view(a.grams + number * vector_gram(beta is not None), (C,), (8,), np.float64)
            P[(start + t) % C] = q @ (u * k)
        old, S = S, np.exp(g)[:, None] * S
        new = v if beta is None else beta[t] * (v - k @ S)
        if getattr(c, "LA_KEEP", 0) and beta is not None:
            store_rows(a.new_values, call.block(n, head) + (start + t) // C, (start + t) % C, new)
        S = S + np.outer(k, new)
        out[t] = a.scale * (q @ (old + np.outer(u * k, v)) if before else q @ S)
    if is_last and head % a.end_group == 0:
        call.state("end", (n * a.heads + head) // a.end_group, c.LA_K, c.LA_V)[:] = S


def _betas(call, n, head, start, stop):
    """beta of tokens start .. stop; None without an erase term."""
    at, (row, first, _) = SimpleNamespace(**call.a.beta), call.sequence(n)
    if not at.data:
        return None
    data = at.data + 4 * (row * at.batch + (first + start) * at.token + head // at.group * at.head)
    return _view(data, (stop - start,), (4 * at.token,), np.float32).astype(np.float64)
