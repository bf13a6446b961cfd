"""Twins of the kernels of cuda_src/ops/, (entry, constants, blocks, bytes of the arguments): no GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from linattn_np.ops.cuda import formulas
from linattn_np.ops.cuda.arguments import COLUMN_SUMS, FORMULA, GATE_FORMULA, GAUGE, PRODUCT, STEP_SIZE, UNIT_ROWS
from tests.matrix_state.cuda.step_twin import KINDS, _rows

THREADS, F32, BFLOAT16 = 256, np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def rows(entry, d, blocks, arguments):
    """What unit_rows.cu does, in float32."""
    unpacked, K, kind, grad = UNIT_ROWS.unpack(arguments), d["LA_K"], KINDS[d["LA_DTYPE"]], KINDS[d["LA_GRAD"]]
    count = 0
    for n, of in enumerate(unpacked["of"]):
        if n == 1:
            assert unpacked["first"] == count
        if not of["y"]:
            continue
        x, T, heads, rows = of["x"], of["T"], of["heads"], of["rows"]
        shape = (rows // T // heads, T, heads, K)

        def dense(p, kind, shape=shape):
            return _rows(p, tuple(kind.itemsize * int(np.prod(shape[i + 1 :])) for i in range(4)), shape, kind)

        y = _rows(x["data"], (x["batch"], x["token"], x["head"], kind.itemsize), shape, kind).astype(F32)
        length = np.sqrt((y * y).sum(-1, keepdims=True) + np.float32(unpacked["root"]) ** 2)
        length = np.where(length == 0, 1, length)
        y = y / length
        if entry == "unit_rows_vjp":
            dy = dense(of["dy"], grad).astype(F32)
            dense(of["y"], kind)[...] = (dy - y * (y * dy).sum(-1, keepdims=True)) / length
        else:
            dense(of["y"], kind)[...] = y
        count += -(-rows // (THREADS // d["LA_LANES"]))
    assert blocks == count


def gates(entry, d, blocks, arguments):
    """What gate_formula.cu does, in float32."""
    unpacked = GATE_FORMULA.unpack(arguments)
    tokens, width, each = (unpacked[n] for n in ("tokens", "width", "each"))
    kind, heads = KINDS[d["LA_DTYPE"]], width // each

    def of_tokens(name, kind=F32):
        return _rows(unpacked[name], (width * kind.itemsize, kind.itemsize), (tokens, width), kind)

    of_heads = _rows(unpacked["A_log"], (4,), (heads,), F32)
    bias = _rows(unpacked["bias"], (4,), (width,), F32)
    raw = of_tokens("raw", kind).astype(F32) + (0 if bias is None else bias)
    rate = 1 if of_heads is None else np.repeat(np.exp(of_heads), each)
    bounded = entry.startswith("bounded_gate")
    x = rate * raw if bounded else raw
    sigmoid, bound = 1 / (1 + np.exp(-x)), unpacked["bound"]
    g = bound * sigmoid if bounded else -rate * np.logaddexp(0, x)
    if not entry.endswith("vjp"):
        assert blocks == -(-tokens * width // THREADS)
        of_tokens("g")[...] = g
        return
    dg = of_tokens("dg")
    d_scaled, scaled = (bound * dg * sigmoid * (1 - sigmoid), x) if bounded else (dg, g)
    da = rate * d_scaled if bounded else -rate * dg * sigmoid
    of_tokens("da")[...] = da
    parts = -(-tokens // unpacked["block"])
    assert blocks == parts * -(-width // THREADS)
    to = _rows(unpacked["parts"], (8 * width, 4 * width, 4), (parts, 2, width), F32)
    for n in range(parts):
        own = slice(n * unpacked["block"], (n + 1) * unpacked["block"])
        to[n] = da[own].sum(0), (scaled * d_scaled)[own].sum(0)


def products(entry, d, blocks, arguments):
    """What product.cu does, in float32."""
    a = SimpleNamespace(**PRODUCT.unpack(arguments))
    x, y, z, add, dx, dy = (None if not at else np.frombuffer((ctypes.c_uint16 * a.size).from_address(at), BFLOAT16)
                            for at in (a.x, a.y, a.z, a.add, a.dx, a.dy))  # fmt: skip
    if entry == "product":
        z[:] = x.astype(np.float32) * y.astype(np.float32)
        return
    more = 0 if add is None else add.astype(np.float32)
    dx[:] = z.astype(np.float32) * y.astype(np.float32) + more
    dy[:] = z.astype(np.float32) * x.astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def step_sizes(entry, d, blocks, arguments):
    """What step_size.cu does, in float32."""
    f32 = F32
    if entry == "column_sums":
        unpacked = COLUMN_SUMS.unpack(arguments)
        rows, width, block = unpacked["rows"], unpacked["width"], unpacked["block"]
        x, parts = _rows(unpacked["x"], (4 * width, 4), (rows, width), f32), -(-rows // block)
        assert blocks == parts * -(-width // THREADS)
        to = _rows(unpacked["y"], (4 * width, 4), (parts, width), f32)
        for n in range(parts):
            to[n] = x[n * block : (n + 1) * block].sum(axis=0)
        return
    own, grad, V = KINDS[d["LA_DTYPE"]], KINDS[d["LA_GRAD"]], d["LA_K"]
    at = unpacked = STEP_SIZE.unpack(arguments)
    rows, T, H, dt_kind, soft, low, high = (
        unpacked[n] for n in ("rows", "T", "heads", "dt_kind", "soft", "low", "high")
    )
    assert blocks == -(-rows // (THREADS // d["LA_LANES"]))
    assert V % d["LA_PER"] == 0

    def lying(data, batch, token, head, group):
        assert group == 1
        return _rows(data, (batch, token, head, own.itemsize), (rows // T // H, T, H, V), own)

    x, z = lying(**unpacked["x"]), lying(**unpacked["z"])
    wide = (rows // T // H, T, H, V)
    dense = lambda name, kind, shape: _rows(at[name], tuple(  # noqa: E731
        kind.itemsize * int(np.prod(shape[i + 1 :])) for i in range(len(shape))), shape, kind)  # fmt: skip
    number = lambda name: dense(name, f32, wide[:3])  # noqa: E731
    by_head = lambda name: dense(name, f32, (H,))  # noqa: E731
    x, D, dout = x.astype(f32), by_head("D"), dense("dout", own, wide)
    other = dense("other", grad, wide)
    if entry.startswith("step_size"):
        raw = dense("dt", KINDS[dt_kind], wide[:3]).astype(f32)
        raw = raw if by_head("bias") is None else raw + by_head("bias")
        after = np.logaddexp(0, raw) if soft else raw
        dt = np.clip(after, low, high)
    if entry == "step_size":
        dense("y", own, wide)[...] = dt[..., None] * x
        number("g")[...] = dt * by_head("A")
    elif entry == "step_size_vjp":
        dv, dg = other.astype(f32), number("dg")
        ddt = np.where((after >= low) & (after <= high), (dv * x).sum(-1) + dg * by_head("A"), 0)
        number("ddt")[...] = ddt * sigmoid(raw) if soft else ddt
        number("dA")[...] = dg * dt
        skipped = 0 if dout is None else D[:, None] * dout.astype(f32)
        dense("dx", own, wide)[...] = dt[..., None] * dv + skipped
        if dout is not None:
            number("dD")[...] = (dout.astype(f32) * x).sum(-1)
    else:
        out = other.astype(f32) + (0 if D is None else D[:, None] * x)
        gate = 1 if z is None else z.astype(f32) * sigmoid(z.astype(f32))
        if entry == "finish":
            dense("y", own, wide)[...] = out * gate
        else:
            z, dout = z.astype(f32), dout.astype(f32)
            dense("dz", own, wide)[...] = dout * out * sigmoid(z) * (1 + z * (1 - sigmoid(z)))
            dense("y", own, wide)[...] = dout * gate


def gauge(entry, d, blocks, arguments):
    """What gauge.cu does."""
    a = GAUGE.unpack(arguments)
    N, T, H = a["sequences"], a["T"], a["heads"]
    assert blocks == -(-N * H // THREADS)
    assert not a["offsets"]

    def dense(name, kind, *shape):
        strides = [kind.itemsize * int(np.prod(shape[n + 1 :])) for n in range(len(shape))]
        return _rows(a[name], strides, shape, kind)

    wide = np.dtype(np.float64)
    fade, write, before = dense("a", wide, N, T, H), dense("b", wide, N, T, H), dense("m_0", F32, N, H)
    for t in range(T):
        most = np.maximum(fade[:, t] + before, write[:, t])
        most = most.astype(F32) if t == T - 1 else most
        gates = fade[:, t] + before - most, np.exp(write[:, t] - most), np.exp(-most)
        for name, y in zip(("decay", "write", "least"), gates, strict=True):
            dense(name, F32, N, T, H)[:, t] = y
        dense("m", wide, N, T, H)[:, t] = before = most


def _step(a, x, y):
    return np.logaddexp(0, x + y) if a["how"] else x + y


def _capped(a, x):
    return a["a"] * np.tanh(x / a["a"]) if a["a"] > 0 else x


def _sum(x):
    return x.sum(-1, keepdims=True)


def _normed(a, x, y=1, z=0, u=None):
    d = x - x.mean(-1, keepdims=True)
    square = _sum(d * d) + a["a"] ** 2
    return y * d * np.sqrt(x.shape[-1] / np.where(square == 0, x.shape[-1], square)) + z


def _softmax(a, x, *_):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / _sum(e)


def _strength(a, x, y, *_):
    step = y * _sum(x * x)
    return y / (1 + step) if a["how"] else np.where(step == 0, y, -y * np.expm1(-step) / np.where(step == 0, 1, step))


def _quotient(a, x, y=None, *_):
    total = x[..., -1:] + a["a"] if y is None else np.maximum(abs(x[..., -1:]), y)
    return np.where(total == 0, 0, x[..., :-1] / np.where(total == 0, 1, total))


def _turned(a, even, odd, c, s):
    s = -s if a["how"] else s
    return even * c - odd * s, even * s + odd * c


def _rotated(a, x, c, s, _=None):
    out, P = x.copy(), c.shape[-1]
    out[..., 0 : 2 * P : 2], out[..., 1 : 2 * P : 2] = _turned(a, x[..., 0 : 2 * P : 2], x[..., 1 : 2 * P : 2], c, s)
    return out


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _silu_slope(z):
    return _sigmoid(z) * (1 + z * (1 - _sigmoid(z)))


def _or(x, otherwise):
    return otherwise if x is None else x


def _projected(x, w, count):
    return x @ w.reshape(-1)[: x.shape[-1] * count].reshape(x.shape[-1], count)


def _over_length(a, x, y, *_):
    length = np.sqrt(_sum(y * y) + a["a"] ** 2)
    return x / np.where(length == 0, 1, length)


def _favor(a, x, w, *_):
    n = w.shape[-1] // x.shape[-1]
    angle = _projected(x, w[0, 0, 0], n)
    angle = np.concatenate([angle, -angle], axis=-1) if a["how"] else angle
    return np.exp(angle - a["a"] ** 2 / 2 * _sum(x * x) - a["b"])


def _fourier(a, x, w, *_):
    angle = _projected(x, w[0, 0, 0], w.shape[-1] // x.shape[-1])
    return a["a"] * np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)


def _monomials(a, x, weights, first, second):
    one = np.concatenate([a["a"] * x, np.ones_like(x[..., :1])], axis=-1)  # channel -1
    return weights * one[..., first[0, 0, 0].astype(int)] * one[..., second[0, 0, 0].astype(int)]


def _feature(a, x, *_):
    e = np.exp(np.minimum(x, 0) if a["how"] == 0 else x)
    return [np.where(x > 0, x + 1, e), np.maximum(x, 0), e, x * _sigmoid(x)][a["how"]]


def _feature_vjp(a, x, y, *_):
    e = np.exp(np.minimum(x, 0) if a["how"] == 0 else x)
    return y * [np.where(x > 0, 1, e), x > 0, e, _silu_slope(x)][a["how"]]


FORMULAS = {  # (arguments, x, y, z, u): None where an array is not given
    "copy": lambda a, x, *_: x,
    "filled": lambda a, *_: a["a"],
    "scaled": lambda a, x, *_: a["a"] * x,
    "product": lambda a, x, y, z, u: x * y * _or(z, 1),
    "complement": lambda a, x, y, z, u: -np.expm1(x) * _or(y, 1),
    "complement_vjp": lambda a, x, y, z, u: y - np.exp(x) * z,
    "log_rest": lambda a, x, *_: np.log1p(-np.minimum(x, 1)),
    "step_size": lambda a, x, y, z, u: np.clip(_step(a, x, _or(y, 0)), a["a"], a["b"]),
    "step_size_vjp": lambda a, x, y, z, u: np.where(
        (_step(a, x, _or(y, 0)) >= a["a"]) & (_step(a, x, _or(y, 0)) <= a["b"]),
        z * (_sigmoid(x + _or(y, 0)) if a["how"] else 1), 0),
    "skip_and_gate": lambda a, x, y, z, u: (x if y is None else x + y * z) * (1 if u is None else u * _sigmoid(u)),
    "gate_vjp": lambda a, x, y, z, u: x * y * _silu_slope(z),
    "capped": lambda a, x, *_: _capped(a, x),
    "log_forget": lambda a, x, *_: np.maximum(_capped(a, x) if a["how"] else -np.logaddexp(0, -_capped(a, x)), a["b"]),
    "log_decay": lambda a, x, y, z, u: -np.exp(z) * np.logaddexp(0, x + _or(y, 0)),
    "bounded": lambda a, x, y, z, u: a["a"] * _sigmoid((x + _or(y, 0)) * (1 if z is None else np.exp(z))),
    "appended": lambda a, x, y, z, u: _or(u, 1) * np.concatenate(
        [x, np.broadcast_to(_or(y, 1), (*x.shape[:-1], 1))], axis=-1),
    "quotient": _quotient,
    "normed": lambda a, x, y, z, u: _normed(a, x, _or(y, 1), _or(z, 0)),
    "softmax": _softmax,
    "softmax_vjp": lambda a, x, y, *_: x * (y - _sum(x * y)),
    "strength": _strength,
    "turn": lambda a, x, y, *_: np.concatenate([np.cos(x * y), np.sin(x * y)], axis=-1),
    "rotated": _rotated,
    "feature": _feature,
    "feature_vjp": _feature_vjp,
    "over_length": _over_length,
    "favor": _favor,
    "fourier": _fourier,
    "monomials": _monomials,
    "rotated_pair": lambda a, x, c, s, _: np.concatenate(_turned(a, *np.split(x, 2, axis=-1), c, s), axis=-1),
}  # fmt: skip


def formula(entry, d, blocks, arguments):
    """What formula.cu does."""
    a, name = FORMULA.unpack(arguments), {n: name for name, n in formulas.FORMULAS.items()}[d["LA_KIND"]]
    heads, tokens, real = a["heads"], a["tokens"], np.dtype(np.float64 if d["LA_DOUBLE"] else np.float32)
    lead = (a["rows"] // heads // tokens, heads, tokens)
    of_rows, width = name in formulas.OF_ROWS, a["out"]["width"]
    assert blocks == -(-a["rows"] // 8 if of_rows else -a["rows"] * width // THREADS)

    def array(at):
        if not at["data"]:
            return None
        kind = np.dtype(next(n for n, k in formulas.KINDS.items() if k == at["kind"]))
        strides = at["batch"], at["head"], at["token"], at["column"]
        return _rows(at["data"], strides, (*lead, at["width"]), kind)

    given = [None if (y := array(a[n])) is None else y.astype(real) for n in formulas.NAMES]
    array(a["out"])[...] = FORMULAS[name](a, *given)
