"""A twin of the kernels of a vector decay that reads the bytes of their arguments, token by token in NumPy: no GPU."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace

import numpy as np

from linattn_np.matrix_state.cuda.arguments import VECTOR

MAP = struct.Struct("<Q4q4qI")  # data, shape, strides, bytes of an element
C, STATE = 64, (128, 128)


def tensor_map(x, steps=1):
    """What stands for the driver's map: where an array lies, and how."""
    return MAP.pack(x.data.ptr, *x.shape, *x.strides, x.itemsize).ljust(128, b"\0")


def _view(address, shape, strides, dtype):
    span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    raw = np.frombuffer((ctypes.c_uint8 * span).from_address(address), np.uint8)
    return np.ndarray(shape, dtype, buffer=raw.data, strides=strides)


def _mapped(data, narrow):
    """The array of a map; 16-bit elements are of dtype `narrow`."""
    address, *numbers, size = MAP.unpack(data[: MAP.size])
    return _view(address, tuple(numbers[:4]), tuple(numbers[4:]), narrow if size == 2 else np.float32)


def _array(address, *shape, dtype=np.float32):
    strides = np.cumprod((np.dtype(dtype).itemsize, *shape[:0:-1]))[::-1]
    return _view(address, shape, tuple(map(int, strides)), dtype) if address else None


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


def run(entry, constants, blocks, arguments, narrow):
    """One launch."""
    call = _Call(constants, arguments, narrow)
    a = call.a
    if entry == "segments":
        for slot in range(blocks // 16):
            _segments(call, slot)
        return
    pieces = a.segments - (entry == "adds")
    for block in range(blocks):
        slot, segment = divmod(block, pieces)
        n, head = divmod(slot, a.heads)
        T = call.sequence(n)[2]
        last = max(-(-T // C) - 1, 0) // a.chunks
        start, stop = segment * a.chunks * C, min(T, (segment + 1) * a.chunks * C)
        if entry == "adds" and segment < last:
            _adds(call, n, head, segment, start, stop)
        if entry == "scan" and segment <= last:
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
    for segment in range(max(-(-call.sequence(n)[2] // C) - 1, 0) // a.chunks):
        number = slot * (a.segments - 1) + segment
        added, decays = _array(a.added, number + 1, *STATE)[number], _array(a.decays, number + 1, 128)[number]
        S = decays[:K, None] * S + added[:V, :K].T
        begins[slot * a.segments + segment + 1] = 0
        begins[slot * a.segments + segment + 1, :V, :K] = S.T


def _scan(call, n, head, segment, start, stop, is_last):
    a, c = call.a, call.constants
    flags = _array(a.flags, (n * a.heads + head) * a.segments + segment + 1, dtype=np.int32)
    if c.LA_EXACT:
        assert flags[-1] == 0
        return
    flags[-1] = 0
    S, out = call.begin(n, head, segment), call.rows("out", head, n, start, stop)
    u = _array(a.u, head // a.group_u + 1, c.LA_K)[-1].astype(np.float64) if c.LA_BONUS else 0.0
    for t, (q, k, v, g) in enumerate(zip(*_tokens(call, n, head, start, stop, "qkvg"), strict=True)):
        before, S = S, np.exp(g)[:, None] * S + np.outer(k, v)
        out[t] = a.scale * (q @ (before + np.outer(u * k, v)) if c.LA_BEFORE else q @ S)
    if is_last and head % a.end_group == 0:
        call.state("end", (n * a.heads + head) // a.end_group, c.LA_K, c.LA_V)[:] = S
