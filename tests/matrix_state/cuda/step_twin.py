"""A twin of step.cu that reads the bytes of its arguments, and arrays that look like CuPy's: no GPU."""

from __future__ import annotations

import ctypes
import functools
from types import SimpleNamespace

import array_api_compat.numpy as xp
import ml_dtypes
import numpy as np

from linattn_np.matrix_state.cuda.arguments import SOLVE, STEP
from linattn_np.ops.conjugate_gradients import conjugate_gradients

KINDS = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))


class Stub(np.ndarray):
    """A NumPy array with what the host side asks of a CuPy array."""

    device = SimpleNamespace(id=0)

    @property
    def data(self):
        at = self.ctypes.data
        return SimpleNamespace(ptr=at, device_id=0, copy_to_host_async=lambda to, size: ctypes.memmove(to, at, size))

    @property
    def _c_contiguous(self):
        return self.flags.c_contiguous

    def __array_function__(self, function, types, args, keywords):
        found = super().__array_function__(function, types, args, keywords)
        return found.view(Stub) if type(found) is np.ndarray else found


def stub(x):
    """A copy whose memory begins as a device's would, at a multiple of 256 bytes."""
    buffer = np.empty(x.nbytes + 256, np.uint8)
    at = -buffer.ctypes.data % 256
    y = buffer[at : at + x.nbytes].view(x.dtype).reshape(x.shape).view(Stub)
    y[...] = x
    return y


class Namespace:
    """A stand-in for CuPy's namespace."""

    __name__ = "array_api_compat.cupy"

    def __getattr__(self, name):
        found = getattr(xp, name)
        if isinstance(found, type) or not callable(found):
            return found

        def call(*how, **named):
            made = found(*how, **named)
            return made.view(Stub) if type(made) is np.ndarray else made

        return call

    def empty(self, shape, dtype=None, **_):
        return stub(np.full(shape, np.nan, dtype))

    def asarray(self, x, dtype=None, **_):
        return stub(np.asarray(x, dtype))

    def arange(self, *how, dtype=None, **_):
        return stub(np.arange(*how, dtype=dtype))

    def broadcast_to(self, x, shape):
        return np.broadcast_to(x, shape, subok=True)

    def astype(self, x, dtype, **_):
        return stub(np.asarray(x).astype(dtype))

    def ascontiguousarray(self, x):
        return x if isinstance(x, Stub) and x.flags.c_contiguous else stub(np.asarray(x))


CUPY = Namespace()


SIZE = STEP.size
VECTORS = ("q", "k", "v", "g", "gv", "r", "beta", "a", "b", "u", "out", "w", "least")


def _rows(pointer, strides, shape, dtype):
    """An array over raw memory."""
    if not pointer:
        return None
    if 0 in shape:
        return np.empty(shape, dtype)
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    low, high = sum(s for s in reach if s < 0), sum(s for s in reach if s > 0) + dtype.itemsize
    raw = np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(pointer + low), dtype=np.uint8)
    return np.ndarray(shape, dtype, raw.data, -low, strides)


def run(constants, arguments):
    """What the kernel does, in float32, one head at a time, from and into raw memory."""
    d = dict(constants)
    K, V, element = d["LA_K"], d["LA_V"], KINDS[d["LA_DTYPE"]]
    unpacked = STEP.unpack(arguments)
    pointers, where = unpacked, {n: dict(unpacked[f"at_{n}"]) for n in VECTORS}
    for at in where.values():
        at["group"] = round(2**32 / at["group"]) if at["group"] else 1
    count, T, heads, readers, inverse = (unpacked[n] for n in ("places", "T", "heads", "readers", "heads_inverse"))
    scale, slot_bytes = unpacked["read"], unpacked["slot_bytes"]
    places = {w: [unpacked[f"{w}_{n}"] for n in ("slot", "head", "row")] for w in ("start", "end")}
    assert len(arguments) == SIZE
    assert heads == 1 or inverse == -(-(2**32) // heads)
    if d["LA_ONE"]:  # what the kernel of one token does not look at
        assert (T, readers, pointers["offsets"], d["LA_WIDE"]) == (1, 1, 0, 1)
        assert all(abs(at[n]) < 2**31 for at in where.values() for n in ("batch", "token", "head"))
        assert all(abs(n) < 2**29 for n in (*places["start"], *places["end"]))
        assert {places["start"][2] or V, places["end"][2] or V} == {V}
    slot_type = np.dtype(np.int32 if slot_bytes == 4 else np.int64)
    N = run.blocks // heads // -(-V // (d["LA_LANES"] * d["LA_PER"] * (d["LA_WARPS"] // d["LA_SPLIT"])))

    def vector(name, n, first, t, head, width):
        at = where[name]
        dtype = element if name in ("q", "k", "v", "r", "a", "b") else KINDS[at["kind"]]
        dtype = KINDS[d["LA_OUT"]] if name == "out" else KINDS[d["LA_VALUES"]] if name == "v" else dtype
        assert at["kind"] == KINDS.index(dtype)
        base = pointers[name] + n * at["batch"] + (first + t) * at["token"] + head // at["group"] * at["head"]
        return _rows(base, (dtype.itemsize,), (width,), dtype)

    def given(row, first, t, n_steps, own, name, width, head=None):
        at = t // n_steps if name in "qg" else t
        return vector(name, row, first, at, own if head is None else head, width).astype(np.float32)

    def state(which, n, head):
        pointer, (slot, by_head, by_row) = pointers[which], places[which]
        slots = pointers[f"{which}_slots"]
        if which == "start" and pointers["fresh"] and _rows(pointers["fresh"] + n, (1,), (1,), np.dtype(bool))[0]:
            return None
        n = n if not slots else int(_rows(slots + n * slot_bytes, (slot_bytes,), (1,), slot_type)[0])
        if not pointer or (slots and not 0 <= n < count):
            return None
        kind = KINDS[d[f"LA_{which.upper()}"]]
        size = kind.itemsize
        return _rows(pointer + size * (n * slot + head * by_head), (size * by_row, size), (K, V), kind)

    for n in range(N):
        row, first, tokens = n, 0, T
        if pointers["offsets"]:
            first, stop = (int(i) for i in _rows(pointers["offsets"] + 8 * n, (8,), (2,), np.dtype(np.int64)))
            row, tokens = 0, stop - first
        for head in range(heads):
            begin = state("start", n, head)
            S = np.zeros((K, V), np.float32) if begin is None else begin.astype(np.float32)
            n_steps = unpacked["steps"] if d["LA_MICRO"] else 1
            for t in range(tokens):
                row_of = lambda which, w=n * heads + head: _rows(  # noqa: E731
                    pointers[which] + 4 * w * K if pointers[which] else 0, (4,), (K,), KINDS[2])  # fmt: skip
                S = _token(
                    d,
                    S,
                    functools.partial(given, row, first, t, n_steps, head),
                    lambda h, row=row, at=(first, t // n_steps): vector("out", row, *at, h, V),
                    head,
                    readers,
                    scale,
                    pointers,
                    row_of,
                    t % n_steps == 0,
                    (t + 1) % n_steps == 0,
                )
            end = state("end", n, head)
            if end is not None:
                end[...] = S


def _of_raw(d, given, head, a):
    """Arrays of a token computed of raw projections: rows over their length, log decays and strengths by a formula."""
    K, f32 = d["LA_K"], np.dtype(np.float32)

    def length(row):
        n = np.sqrt((row.astype(np.float64) ** 2).sum() + a["root"] ** 2).astype(f32)
        return n if n else f32.type(1)

    def get(name, *at):
        y = given(name, *at)
        if name in ("q", "k") and d["LA_UNIT"]:
            return y / length(y)
        if name == "r" and d["LA_UNIT"] == 2:
            return y / length(given("k", K))
        if name == "beta" and d["LA_SIGMOID"]:
            return f32.type(a["strongest"]) / (1 + np.exp(-y))
        if name == "g" and d["LA_RAW_GATE"]:
            rate, bias = _rows(a["A_log"], (4,), (head + 1,), f32), _rows(a["bias"], (4,), ((head + 1) * len(y),), f32)
            rate = 1 if rate is None else np.exp(rate[head])
            y = y if bias is None else y + bias[head * len(y) :]
            if d["LA_RAW_GATE"] == 1:
                return -rate * np.logaddexp(0, y)
            return f32.type(a["bound"]) / (1 + np.exp(-rate * y))
        return y

    return get


def _token(d, S, get, out, head, readers, scale, pointers, row_of, decays, reads):
    K, V = d["LA_K"], d["LA_V"]
    get = _of_raw(d, get, head, pointers)
    k, v = get("k", K), get("v", V)
    if d["LA_SUMS"]:
        w, z = get("w", 1)[0] if pointers["w"] else 1, row_of("z")
        decay = np.exp(get("g", 1)[0]) if d["LA_DECAY"] else 1
        v, z = w * v, w * k + (0 if z is None else decay * z)
        row_of("z_end")[...] = z

    def read(S):
        for reader in range(readers):
            q = get("q", K, head * readers + reader)
            y = q @ S
            if d["LA_BONUS"]:
                y = y + (q * get("u", K) * k).sum() * v
            y = scale * y
            if d["LA_SUMS"]:
                total = scale * (q @ z)
                total = total + pointers["eps"] if d["LA_SUMS"] == 1 else max(abs(total), get("least", 1)[0])
                y = y / total if total else 0 * y
            out(head * readers + reader)[...] = y

    x = get("a", K) if d["LA_ERASE"] == 2 else get("r", K) if d["LA_SEPARATE_ERASE_KEY"] else k
    if d["LA_READ"] == 2:
        read(S)
    recalled = x @ S
    if d["LA_DECAY"] and decays:
        S = S * np.exp(get("g", K if d["LA_DECAY"] == 2 else 1))[:, None]
    if d["LA_ROTATE"]:
        P = pointers["pairs"]
        theta = _rows(pointers["theta"], (4,), (P,), np.dtype(np.float32))[:, None]
        even, odd = S[0 : 2 * P : 2].copy(), S[1 : 2 * P : 2].copy()
        S = S.copy()
        S[0 : 2 * P : 2], S[1 : 2 * P : 2] = (
            np.cos(theta) * even + np.sin(theta) * odd,
            np.cos(theta) * odd - np.sin(theta) * even,
        )
    if d["LA_VALUE_DECAY"]:
        S = S * np.exp(get("gv", V))
    if d["LA_ERASE"] == 1:
        recalled = recalled if d["LA_ERASE_BEFORE"] else x @ S
        S = S + np.outer(k, get("beta", 1) * (v - recalled))
    else:
        S = S + np.outer(k, v)
    if d["LA_ERASE"] == 2:
        S = S + np.outer(get("b", K), recalled)
    if d["LA_READ"] == 1 and reads:
        read(S)
    return S


def run_solve(heads, constants, arguments):
    """A twin of solve.cu."""
    d, unpacked = dict(constants), SOLVE.unpack(arguments)
    K, f32 = d["LA_K"], np.dtype(np.float32)

    def rows(name, *shape):
        strides = [4 * int(np.prod(shape[n + 1 :])) for n in range(len(shape))]
        return _rows(unpacked[name], strides, shape, f32)

    q, k, ridge, x = (rows(n, heads, K) for n in ("q", "k", "ridge", "x"))
    g, beta, start, end = rows("g", heads), rows("beta", heads), rows("start", heads, K, K), rows("end", heads, K, K)
    for h in range(heads):
        Z = np.zeros((K, K), f32) if start is None else (1 if g is None else np.exp(g[h])) * start[h]
        end[h] = Z + np.outer(k[h], beta[h] * k[h])
        A, b = end[h] + np.diag(ridge[h]), q[h]
        solved = np.linalg.solve(A.T, b)
        if d["LA_ITERATIONS"]:
            tolerance = unpacked["enough"] ** 0.5
            solved = conjugate_gradients(np, lambda p: p @ A, b[None], d["LA_ITERATIONS"], tolerance)[0]  # noqa: B023
        x[h] = solved


def recorded_plans():
    """The recorded plans of calls on CuPy arrays, or on stubs of them."""
    from linattn_np.call.replay import plans as replay
    from linattn_np.call.replay.vjp import Forward
    from linattn_np.runtime.cuda import record

    return [
        plan
        for plan in replay.by_key.values()
        if type(plan) is record.LaunchSequence or (type(plan) is Forward and plan.module is record)
    ]
