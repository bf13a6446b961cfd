"""Every compiled formula against NumPy's float64, of every storage dtype and layout, and always with the same bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

from linattn_np.ops.cpu.formulas import KINDS, OF_ROWS, cast, compiled, put
from linattn_np.ops.cpu.grid import TASK, TILE, takes
from linattn_np.ops.rows import interleaved

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
STORAGE = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(0, x)


def silu(x):
    return x * sigmoid(x)


def silu_slope(x):
    return sigmoid(x) * (1 + x * (1 - sigmoid(x)))


def steps(raw, a, b, how):
    return np.clip(softplus(raw) if how else raw, a, b)


def capped(x, a):
    return a * np.tanh(x / a) if a else x


def total(x, y, a):
    return x[..., -1:] + a if y is None else np.maximum(np.abs(x[..., -1:]), y)


def normed(x, y, z, a):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + a**2 / x.shape[-1])
    return (x if y is None else x * y) + (0 if z is None else z)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def dpfp(x, nu):
    r = np.maximum(np.concatenate([x, -x], -1), 0)
    return np.concatenate([r * np.roll(r, j + 1, -1) for j in range(nu)], -1)


def dpfp_slope(x, y, nu):
    """The transpose, row by row: y is long enough for nu = 2."""
    n, r = x.shape[-1], np.maximum(np.concatenate([x, -x], -1), 0)
    dr = sum(d * np.roll(r, j + 1, -1) + np.roll(d * r, -j - 1, -1)
             for j in range(nu) for d in [y[..., 2 * n * j : 2 * n * (j + 1)]])  # fmt: skip
    return np.where(x > 0, dr[..., :n], 0) - np.where(x < 0, dr[..., n:], 0)


def flow(x, y, how):
    s = (x**2).sum(-1, keepdims=True)
    return y / (1 + y * s) if how else -np.expm1(-y * s) / s


def flow_slopes(x, y, z, how):
    """z times the derivatives of flow by y, and, from how = 2 on, twice those by s."""
    s = (x**2).sum(-1, keepdims=True)
    t = y * s
    if how % 2:
        return z * (-2 * (y / (1 + t)) ** 2 if how > 1 else 1 / (1 + t) ** 2)
    return z * (2 * y**2 * (np.exp(-t) + np.expm1(-t) / t) / t if how > 1 else np.exp(-t))


def bounded_vjp(x, y, z, u, a, how):
    rate, raw = 1 if z is None else np.exp(z), x + (0 if y is None else y)
    s = sigmoid(rate * raw)
    return a * u * s * (1 - s) * (rate * raw if how else rate)


def quotient_vjp(x, y, z, eps):
    num, den = x[..., :-1], x[..., -1:]
    if z is None:
        dnum = y / (den + eps)
        return np.concatenate([dnum, -(dnum * num).sum(-1, keepdims=True) / (den + eps)], -1)
    dnum = y / np.maximum(np.abs(den), z)
    dden = np.where(np.abs(den) > z, -np.sign(den) * (dnum * num).sum(-1, keepdims=True) / np.abs(den), 0)
    return np.concatenate([dnum, dden], -1)


def turned(x, c, s, how):
    P, s, out = c.shape[-1], -s if how else s, x.copy()
    even, odd = x[..., 0 : 2 * P : 2], x[..., 1 : 2 * P : 2]
    out[..., 0 : 2 * P : 2], out[..., 1 : 2 * P : 2] = even * c - odd * s, even * s + odd * c
    return out


def pair(x, c, s, how):
    (even, odd), s = np.split(x, 2, -1), -s if how else s
    return np.concatenate([even * c - odd * s, even * s + odd * c], -1)


def decay(x, y, z, a, how):
    b = x + (0 if y is None else y)
    return [np.log(sigmoid(b)) / a, np.log(a + (1 - a) * sigmoid(b)), -np.exp(b)][how]


def decay_slope(x, y, z, a, how):
    b = x + (0 if y is None else y)
    s = sigmoid(b)
    return [(1 - s) / a, (1 - a) * s * (1 - s) / (a + (1 - a) * s), -np.exp(b)][how]


def angle_of_pair(x, y):
    (even, odd), (d_even, d_odd) = np.split(x, 2, -1), np.split(y, 2, -1)
    return (even * d_odd - odd * d_even).sum(-1, keepdims=True)


def held(x, y, z):
    """The parts of dt A, then those of (e^{dt A} - 1) / A."""
    A, dt = -np.exp(y) + 1j * z, np.exp(x)
    return np.concatenate([c.astype(complex).view(float) for c in (dt * A, np.expm1(dt * A) / A)], -1)


def held_vjp(x, y, z, u):
    """The gradients of y and z, and the terms of that of x."""
    A, dt, (dz, db) = -np.exp(y) + 1j * z, np.exp(x), np.split(np.ascontiguousarray(u).view(complex), 2, -1)
    e = np.exp(dt * A)
    dA = dt * dz + db * np.conj((dt * e - np.expm1(dt * A) / A) / A)
    return np.concatenate([A.real * dA.real, dA.imag, dt * (dz * A.conj() + db * e.conj()).real], -1)


FEATURES = (lambda x: np.where(x > 0, x + 1, np.exp(x)), lambda x: np.maximum(x, 0), np.exp, silu,
            lambda x: np.sqrt(np.maximum(x, 0)))  # fmt: skip
SLOPES = (lambda x: np.where(x > 0, 1, np.exp(x)), lambda x: x > 0, np.exp, silu_slope,
          lambda x: np.where(x > 0, 0.5 / np.sqrt(np.where(x > 0, x, 1)), 0))  # fmt: skip
# kind: formula of (x, y, z, u, a, b, how) in float64; a, b, the forms
FORMULAS = {
    "copy": (lambda x, y, z, u, a, b, how: x, 0, 0, [0]),
    "scaled": (lambda x, y, z, u, a, b, how: a * x, -0.7, 0, [0]),
    "product": (lambda x, y, z, u, a, b, how: x * y * (1 if z is None else z), 0, 0, [0]),
    "complement": (lambda x, y, z, u, a, b, how: -np.expm1(x) * (1 if y is None else y), 0, 0, [0]),
    "complement_vjp": (lambda x, y, z, u, a, b, how: y - np.exp(x) * z, 0, 0, [0]),
    "log_rest": (lambda x, y, z, u, a, b, how: np.log1p(-x), 0, 0, [0]),
    "step_size": (lambda x, y, z, u, a, b, how: steps(x + (0 if y is None else y), a, b, how), 0.3, 1.1, [0, 1]),
    "step_size_vjp": (lambda x, y, z, u, a, b, how: z * (sigmoid(x + y) if how else 1) * (
        (steps(x + y, -9, 9, how) >= a) & (steps(x + y, -9, 9, how) <= b)), 0.3, 1.1, [0, 1]),
    "skip_and_gate": (lambda x, y, z, u, a, b, how: (x + (0 if y is None else y * z)) * (
        1 if u is None else silu(u)), 0, 0, [0]),
    "gate_vjp": (lambda x, y, z, u, a, b, how: x * y * silu_slope(z), 0, 0, [0]),
    "capped": (lambda x, y, z, u, a, b, how: capped(x, a), 1.5, 0, [0]),
    "log_forget": (lambda x, y, z, u, a, b, how: np.maximum(
        capped(x, a) if how else -softplus(-capped(x, a)), b), 1.5, -1.0, [0, 1]),
    "log_decay": (lambda x, y, z, u, a, b, how: -np.exp(z) * softplus(x + (0 if y is None else y)), 0, 0, [0]),
    "bounded": (lambda x, y, z, u, a, b, how: a * sigmoid((1 if z is None else np.exp(z)) * (
        x + (0 if y is None else y))), -2.5, 0, [0]),
    "log_decay_vjp": (lambda x, y, z, u, a, b, how: u * -np.exp(z) * (softplus if how else sigmoid)(
        x + (0 if y is None else y)), 0, 0, [0, 1]),
    "bounded_vjp": (lambda x, y, z, u, a, b, how: bounded_vjp(x, y, z, u, a, how), -2.5, 0, [0, 1]),
    "added": (lambda x, y, z, u, a, b, how: x + y, 0, 0, [0]),
    "capped_vjp": (lambda x, y, z, u, a, b, how: y * (1 - np.tanh(x / a) ** 2), 1.5, 0, [0]),
    "log_forget_vjp": (lambda x, y, z, u, a, b, how: y * (1 - np.tanh(x / a) ** 2) * (
        (1 if how else sigmoid(-capped(x, a))) * ((capped(x, a) if how else -softplus(-capped(x, a))) > b)),
        1.5, -0.5, [0, 1]),
    "log_rest_vjp": (lambda x, y, z, u, a, b, how: y - z / (1 - x), 0, 0, [0]),
    "inner": (lambda x, y, z, u, a, b, how: (x * y).sum(-1, keepdims=True) + (
        0 if z is None else z * (1 if u is None else u)), 0, 0, [0]),
    "quotient_vjp": (lambda x, y, z, u, a, b, how: quotient_vjp(x, y, z, a), 0.3, 0, [0]),
    "strength_vjp": (lambda x, y, z, u, a, b, how: flow_slopes(x, y, z, how), 0, 0, [0, 1, 2, 3]),
    "feature": (lambda x, y, z, u, a, b, how: FEATURES[how](x), 0, 0, [0, 1, 2, 3, 4]),
    "feature_vjp": (lambda x, y, z, u, a, b, how: y * SLOPES[how](x), 0, 0, [0, 1, 2, 3, 4]),
    "over_length": (lambda x, y, z, u, a, b, how: x / np.sqrt((y**2).sum(-1, keepdims=True) + a**2), 0.2, 0, [0]),
    "over_length_vjp": (lambda x, y, z, u, a, b, how: -y * (z * x).sum(-1, keepdims=True)
                        / ((y**2).sum(-1, keepdims=True) + a**2) ** 1.5, 0.2, 0, [0]),
    "dpfp_vjp": (lambda x, y, z, u, a, b, how: dpfp_slope(x, y, how), 0, 0, [1, 2]),
    "appended": (lambda x, y, z, u, a, b, how: (1 if u is None else u) * np.concatenate(
        [x, np.ones_like(x[..., :1]) if y is None else y + 0 * x[..., :1]], -1), 0, 0, [0]),
    "quotient": (lambda x, y, z, u, a, b, how: x[..., :-1] / total(x, y, a), 0.3, 0, [0]),
    "normed": (lambda x, y, z, u, a, b, how: normed(x, y, z, a), 0.2, 0, [0]),
    "softmax": (lambda x, y, z, u, a, b, how: softmax(-x if how else x), 0, 0, [0, 1]),
    "dpfp": (lambda x, y, z, u, a, b, how: dpfp(x, how), 0, 0, [1, 2]),
    "softmax_vjp": (lambda x, y, z, u, a, b, how: x * (y - (x * y).sum(-1, keepdims=True)), 0, 0, [0]),
    "strength": (lambda x, y, z, u, a, b, how: flow(x, y, how), 0, 0, [0, 1]),
    "cos_sin": (lambda x, y, z, u, a, b, how: np.concatenate([np.cos(x * y), np.sin(x * y)], -1), 0, 0, [0]),
    "rotated": (lambda x, y, z, u, a, b, how: turned(x, y, z, how), 0, 0, [0, 1]),
    "rotated_pair": (lambda x, y, z, u, a, b, how: pair(x, y, z, how), 0, 0, [0, 1]),
    "decay": (lambda x, y, z, u, a, b, how: decay(x, y, z, a, how), 0.3, 0, [0, 1, 2]),
    "decay_vjp": (lambda x, y, z, u, a, b, how: u * decay_slope(x, y, z, a, how), 0.3, 0, [0, 1, 2]),
    "angle_of_pair": (lambda x, y, z, u, a, b, how: a * angle_of_pair(x, y), -0.7, 0, [0]),
    "hold": (lambda x, y, z, u, a, b, how: held(x, y, z), 0, 0, [0]),
    "hold_vjp": (lambda x, y, z, u, a, b, how: held_vjp(x, y, z, u), 0, 0, [0]),
}  # fmt: skip
# which arrays a formula has, and the widths of its rows, or their difference from the first one's
ARRAYS = {
    "copy": ["x"], "scaled": ["x"], "product": ["xy", "xyz"], "complement": ["x", "xy"], "complement_vjp": ["xyz"],
    "log_rest": ["x"], "step_size": ["x", "xy"], "step_size_vjp": ["xyz"], "skip_and_gate": ["xyz", "xyzu", "xu"],
    "gate_vjp": ["xyz"],
    "capped": ["x"], "log_forget": ["x"], "log_decay": ["xz", "xyz"], "bounded": ["x", "xy", "xyz"],
    "appended": ["x", "xu", "xy", "xyu"], "quotient": ["x", "xy"], "normed": ["x", "xyz"], "softmax": ["x"],
    "dpfp": ["x"], "dpfp_vjp": ["xy"], "over_length_vjp": ["xyz"],
    "softmax_vjp": ["xy"], "feature": ["x"], "feature_vjp": ["xy"], "over_length": ["xy"], "strength": ["xy"],
    "log_decay_vjp": ["xzu", "xyzu"], "bounded_vjp": ["xu", "xyu", "xyzu"],
    "added": ["xy"], "capped_vjp": ["xy"], "log_forget_vjp": ["xy"], "log_rest_vjp": ["xyz"],
    "inner": ["xy", "xyz", "xyzu"], "quotient_vjp": ["xy", "xyz"], "strength_vjp": ["xyz"],
    "cos_sin": ["xy"], "rotated": ["xyz"], "rotated_pair": ["xyz"], "angle_of_pair": ["xy"],
    "decay": ["x", "xy"], "decay_vjp": ["xu", "xyu"], "hold": ["xyz"], "hold_vjp": ["xyzu"],
}  # fmt: skip
WIDTHS = {"appended": {"y": 1, "u": 1}, "quotient": {"y": 1}, "strength": {"y": 1}, "cos_sin": {"y": 1},
          "inner": {"z": 1, "u": 1}, "quotient_vjp": {"y": -1, "z": 1}, "strength_vjp": {"y": 1, "z": 1},
          "rotated": {"y": 3, "z": 3}, "rotated_pair": {"y": 1, "z": 1}, "hold": {"x": 1},
          "dpfp_vjp": {"y": lambda width: 4 * width}, "hold_vjp": {"x": 1, "u": lambda width: 4 * width}}  # fmt: skip
OF_A_CPU = {
    ("angle_of_pair", "xy"),
    ("quotient_vjp", "xy"),
    ("over_length_vjp", "xyz"),
    ("dpfp_vjp", "xy"),
    ("hold", "xyz"),
    ("hold_vjp", "xyzu"),
    *(("decay", n) for n in ("x", "xy")),
    *(("decay_vjp", n) for n in ("xu", "xyu")),
}  # on a GPU array calls compute them
CASES = [(kind, names, how) for kind, (_, _, _, hows) in FORMULAS.items() for names in ARRAYS[kind] for how in hows]
every = pytest.mark.parametrize(("kind", "names", "how"), CASES, ids=lambda one: str(one))


def test_the_table_has_every_formula():
    assert FORMULAS.keys() == ARRAYS.keys() == KINDS.keys()


def draw(kind, names, lead, width, dtypes):
    """The arrays x, y, z, u of a formula; None: it does not have one. The last one has no axes before its rows."""
    rng, found = np.random.default_rng(len(lead) + width), []
    for n, dtype in zip("xyzu", dtypes, strict=True):
        if n not in names:
            found.append(None)
            continue
        own = WIDTHS.get(kind, {}).get(n, width)
        own = own(width) if callable(own) else own
        shape = (*(lead if n != names[-1] or n == "x" else lead[-1:]), own if own > 0 else width + own)
        y = rng.uniform(0.1, 0.9, shape) * (-1 if kind.startswith("complement") and n == "x" else 1)
        y -= 0.5 * (n == "x" and kind.startswith(("feature", "dpfp")))
        found.append(y.astype(dtype))
    return found


def expected(kind, arrays, how):
    formula, a, b, _ = FORMULAS[kind]
    return formula(*(None if y is None else y.astype(np.float64) for y in arrays), a, b, how)


def found(kind, arrays, how, out, dtype):
    _, a, b, _ = FORMULAS[kind]
    return compiled(kind, arrays, out, dtype, a, b, how)


def close(x, y, dtype):
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(x.astype(np.float64), y, rtol=0, atol=16 * eps * max(1, np.abs(y).max(initial=0)))


@every
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_formula(kind, names, how, dtype):
    arrays = draw(kind, names, (2, 5, 3), 8, [dtype] * 4)
    exact = expected(kind, arrays, how)
    close(found(kind, arrays, how, (exact.shape, dtype), dtype), exact, dtype)


@every
@pytest.mark.parametrize("own", STORAGE, ids=str)
def test_storage_dtypes(kind, names, how, own):
    """Inputs of all dtypes at once, and a result of each."""
    n = STORAGE.index(own)
    arrays = draw(kind, names, (4, 3), 10, STORAGE[n:] + STORAGE[:n])
    exact = expected(kind, arrays, how)
    close(found(kind, arrays, how, (exact.shape, own), np.float64), exact, own)


@every
def test_arrays_that_are_read_only_and_lie_apart(kind, names, how):
    arrays = draw(kind, names, (3, 2, 5), 6, [np.float32] * 4)
    exact = expected(kind, arrays, how)
    for n, y in enumerate(arrays):
        if y is not None:
            wide = np.full((*y.shape[:-1], 2 * y.shape[-1]), np.nan, np.float32)
            arrays[n] = wide[..., ::-1][..., ::2] if n % 2 else np.moveaxis(np.empty_like(np.moveaxis(y, 0, -1)), -1, 0)
            arrays[n][...] = y
            arrays[n].flags.writeable = False
    whole = np.full((*exact.shape, 2), 7, np.float32)
    close(found(kind, arrays, how, whole[..., 0], np.float32), exact, np.float32)
    assert (whole[..., 1] == 7).all()


@every
def test_many_tiles_and_many_axes(kind, names, how):
    """Longer than a task, where axes merge and where they do not."""
    width = 10 if kind in OF_ROWS else 1
    for lead in ((TASK // 8 + 3,), (2, 3, TILE // 4, 2), (2, 1, 3, 2, 2, 5, 2)):
        arrays = [None if y is None else np.swapaxes(y, 0, -2) if y.ndim > 2 else y
                  for y in draw(kind, names, lead, width, [np.float64] * 4)]  # fmt: skip
        arrays = [y if y is None or y.ndim < 3 or n else np.array(y) for n, y in enumerate(arrays)]
        if len(lead) > 1:
            arrays[-1] = arrays[-1] if arrays[-1] is None or arrays[-1].ndim > 2 else arrays[-1][:1]
            arrays = [y if y is None or y.ndim > 2 else y[:1] for y in arrays]
        exact = expected(kind, arrays, how)
        first = found(kind, arrays, how, (exact.shape, np.float64), np.float64)
        close(first, exact, np.float64)
        assert first.tobytes() == found(kind, arrays, how, (exact.shape, np.float64), np.float64).tobytes()


@every
def test_empty_arrays(kind, names, how):
    arrays = draw(kind, names, (2, 0, 3), 8, [np.float32] * 4)
    exact = expected(kind, arrays, how)
    assert found(kind, arrays, how, (exact.shape, np.float32), np.float32).shape == exact.shape


def test_rows_without_columns():
    x, y = np.zeros((3, 0), np.float32), np.ones((3, 1), np.float32)
    assert np.array_equal(compiled("appended", (x,), ((3, 1), np.float32), np.float32), y)
    assert np.array_equal(compiled("strength", (x, y), ((3, 1), np.float32), np.float32), y)


def test_edges():
    """Log decays of 0 and -inf, slots that are emptied, sums of 0, equal logits of -inf, NaN."""
    g = np.array([0.0, -np.inf, -1e-30, np.nan])
    k = compiled("complement", (g,), (g.shape, g.dtype), g.dtype)
    assert np.array_equal(k, [0, 1, 1e-30, np.nan], equal_nan=True)
    s = np.array([0.0, 1.0, 1.5, np.nan])
    assert np.array_equal(compiled("log_rest", (s,), (s.shape, s.dtype), s.dtype), [0, -np.inf, -np.inf, np.nan],
                          equal_nan=True)  # fmt: skip
    x = np.array([[1.0, 0.0], [0.0, 0.0], [6.0, 3.0]])
    assert np.array_equal(compiled("quotient", (x,), ((3, 1), x.dtype), x.dtype), [[0], [0], [2]])
    x = np.array([[0.0, -np.inf, 0.0], [1.0, np.nan, 2.0]])
    p = compiled("softmax", (x,), (x.shape, x.dtype), x.dtype)
    assert np.array_equal(p, [[0.5, 0, 0.5], [np.nan] * 3], equal_nan=True)
    b = np.array([[0.7], [0.0]])
    assert np.array_equal(compiled("strength", (0 * b, b), (b.shape, b.dtype), b.dtype), b)


@pytest.mark.parametrize("to", STORAGE, ids=str)
@pytest.mark.parametrize("of", STORAGE, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4, 5), (0, 3), (3, 1, 2000), (2, 3, 2, 2, 3)])
def test_a_copy_has_the_bits_of_numpy(of, to, shape):
    x = (10 * np.random.default_rng(0).standard_normal((*shape, 2))).astype(of)
    for y in (x[..., 0], x[..., 1].copy().T, x[..., 0][::-1] if shape else x[..., 1]):
        found, wide = np.full(y.shape, 7, to), np.full((*y.shape, 3), 7, to)
        put(found, y)
        put(wide[..., 1], y)
        assert found.tobytes() == y.astype(to).tobytes() == wide[..., 1].tobytes()
        assert (wide[..., ::2] == 7).all()
        same, like = cast(y, to), y.astype(to)
        assert same.tobytes() == like.tobytes()
        assert [s for s, n in zip(same.strides, y.shape, strict=True) if n > 1] == [
            s for s, n in zip(like.strides, y.shape, strict=True) if n > 1]  # fmt: skip


def test_float64_is_rounded_to_16_bits_as_numpy_does_it():
    """Float16 at once; bfloat16 by way of float32, as ml_dtypes does it."""
    rng = np.random.default_rng(0)
    middle = (1 + (2 * rng.integers(0, 1024, 1000) + 1) / 2048) * 2.0 ** rng.integers(-30, 18, 1000)
    x = np.concatenate([middle, middle * (1 + 2.0**-45), middle * (1 - 2.0**-45), -middle, rng.standard_normal(1000),
                        [0.0, -0.0, np.inf, -np.inf, 1e300, 1e-300, 65504, 65519.999, 65520, 5e-8]])  # fmt: skip
    with np.errstate(all="ignore"):
        for kind in STORAGE[:2]:
            assert cast(x, kind).tobytes() == x.astype(kind).tobytes()


@pytest.mark.parametrize("dtype", STORAGE, ids=str)
def test_rows_between_zeros(dtype):
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 4)).astype(dtype)
    x[0, 0, 0, 0] = np.inf
    for n, at in ((1, 0), (3, 0), (3, 2)):
        y = interleaved(np, x, n, at)
        assert y.dtype == dtype
        assert y.shape == (2, 5 * n, 3, 4)
        assert np.array_equal(y[:, at::n], x)
        assert np.count_nonzero(y) == np.count_nonzero(x)


def test_arrays_that_do_not_fit():
    x, y = np.zeros((3, 4)), np.zeros((2, 4))
    for kind, arrays in (("product", (x, y)), ("softmax_vjp", (x, y)), ("copy", (x,))):
        with pytest.raises(ValueError, match="shape"):
            compiled(kind, arrays, np.zeros((5, 4)), x.dtype)


def test_other_arrays_are_left_to_numpy():
    assert not takes(np.zeros(3, np.int64))
    assert not takes(np.zeros(3, ">f4"))
    assert not takes(np.zeros(13, np.uint8)[1:].view(np.float32))
    to = np.zeros(3)
    put(to, np.arange(3))
    assert np.array_equal(to, [0, 1, 2])
