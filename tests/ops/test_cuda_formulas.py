"""Every formula of cuda_src/ops/formula.cu against NumPy's float64, and sums; emulated here, or on a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

from linattn_np.ops.cuda import formulas, moves, sums
from linattn_np.ops.cuda.activations import forward
from linattn_np.ops.cuda.formulas import FEW, FORMULAS, PAIRS, PER
from linattn_np.runtime.recorder import Recorder
from tests.cuda.emulation import device, emulated  # noqa: F401
from tests.ops.test_formulas import ARRAYS, CASES, OF_A_CPU, STORAGE, close, draw, expected
from tests.ops.test_formulas import FORMULAS as TABLE

CASES = [case for case in CASES if case[:2] not in OF_A_CPU]
every = pytest.mark.parametrize(("kind", "names", "how"), CASES, ids=lambda one: str(one))
TWO = (*PAIRS, "strength_vjp")


def found(device, kind, arrays, how, out, dtype):  # noqa: F811
    _, a, b, _ = TABLE[kind]
    given = [None if y is None else device.bring(y) for y in arrays]
    if kind not in TWO:
        return device.see(formulas.compiled(kind, given, out, dtype, a, b, how))
    which, form = (how >> 1, how & 1) if kind == "strength_vjp" else (how, 0)
    return device.see(formulas.both(kind, given, out, dtype, a, form)[which])


def test_the_table_has_the_formulas_of_a_cpu():
    assert {kind for kind, *_ in CASES} <= FORMULAS.keys()


@every
def test_a_formula(device, kind, names, how):  # noqa: F811
    arrays = draw(kind, names, (2, 5, 3), 8, [np.float32] * 4)
    exact = expected(kind, arrays, how)
    close(found(device, kind, arrays, how, (exact.shape, np.dtype(np.float32)), np.float32), exact, np.float32)


@pytest.mark.parametrize("own", STORAGE, ids=str)
@pytest.mark.parametrize("kind", ["product", "log_decay_vjp", "quotient_vjp", "inner"])
def test_storage_dtypes(device, kind, own):  # noqa: F811
    """Inputs of all dtypes at once, and a result of each."""
    n, names = STORAGE.index(own), ARRAYS[kind][-1]
    arrays = draw(kind, names, (4, 3), 10, STORAGE[n:] + STORAGE[:n])
    exact = expected(kind, arrays, 0)
    close(found(device, kind, arrays, 0, (exact.shape, own), np.float64), exact, own)


@pytest.mark.parametrize("dtype", STORAGE, ids=str)
@pytest.mark.parametrize("kind", ["skip_and_gate", "bounded_vjp"])
@pytest.mark.parametrize("shape", [(FEW + 5,), (3, FEW // PER + 1, 2 * PER), (5, FEW // PER + 1, 7)], ids=str)
def test_many_numbers_are_loaded_together(device, kind, dtype, shape):  # noqa: F811
    """Dense arrays, a tail, rows with one array for all and numbers for all."""
    for names, lead in (("xyzu", shape[:-1]), ("xu", shape[:-1])):
        arrays = draw(kind, names, lead or (1,), shape[-1], [dtype] * 4)
        arrays[3] = arrays[0] if lead == () else arrays[3]
        exact = expected(kind, arrays, 0)
        close(found(device, kind, arrays, 0, (exact.shape, dtype), np.float64 if dtype == np.float64 else np.float32),
              exact, dtype)  # fmt: skip
    if device.launched is not None:
        per = {dict(constants)["LA_PER"] for _, _, constants, *_ in device.launched}
        assert (PER in per) == (shape[-1] % PER == 0 or len(shape) == 1)


def test_arrays_that_lie_apart(device):  # noqa: F811
    whole = device.bring(np.full((3, 5, 6, 2), 7, np.float32))
    x = device.bring(np.arange(360, dtype=np.float32).reshape(3, 5, 6, 4))[..., ::2][..., 1]
    y = device.bring(np.arange(90, dtype=np.float32).reshape(6, 5, 3)).T
    formulas.compiled("added", (x, y), whole[..., 0], np.float32)
    seen = device.see(whole)
    np.testing.assert_array_equal(seen[..., 0], device.see(x) + device.see(y))
    assert (seen[..., 1] == 7).all()


ACTIVATIONS = {
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x))),
    "silu": (lambda x: x / (1 + np.exp(-x))),
    "softplus": (lambda x: np.logaddexp(0, x)),
    "gelu": None, "gelu_tanh": None, "squared_relu": (lambda x: np.maximum(x, 0) ** 2),
}  # fmt: skip


@pytest.mark.parametrize("dtype", STORAGE, ids=str)
@pytest.mark.parametrize("name", formulas.ACTIVATIONS)
def test_activations_and_their_slopes(device, name, dtype):  # noqa: F811
    """Of arrays of 16 bits by approximate exponentials; against the array calls, in float64."""
    from linattn_np.ops import activations, gates

    module = gates if hasattr(gates, name) else activations
    x = np.linspace(-9, 9, FEW + 8).astype(dtype)
    dy = np.cos(np.arange(x.size)).astype(dtype)
    wide, own = x.astype(np.float64), "float64" if dtype == np.float64 else "float32"
    how = formulas.ACTIVATIONS.index(name)
    y = formulas.compiled("activation", (device.bring(x),), (x.shape, dtype), own, how=how)
    close(device.see(y), getattr(module, name)(np, wide), dtype)
    d = formulas.compiled("activation_vjp", (device.bring(x), device.bring(dy)), (x.shape, dtype), own, how=how)
    exact = getattr(module, f"{name}_vjp")(np, wide, dy.astype(np.float64))
    atol = 16 * 9 * float(ml_dtypes.finfo(dtype).eps)  # terms of the size of x cancel
    np.testing.assert_allclose(device.see(d).astype(np.float64), exact, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", STORAGE[:2], ids=str)
@pytest.mark.parametrize("name", [*formulas.ACTIVATIONS, "log_sigmoid"])
def test_approximate_activations_are_rounded_once(device, name, dtype):  # noqa: F811
    """Results in 16 bits are within 0.55 units in the last place of the definition."""
    from linattn_np.ops import activations, gates

    x = np.linspace(-9, 9, FEW + 8).astype(dtype)
    module = gates if hasattr(gates, name) else activations
    wide = x.astype(np.float64)
    exact = getattr(module, name)(np, wide)
    if name == "gelu_tanh":  # 1 + tanh cancels in float64
        exact = wide * gates.sigmoid(np, np.sqrt(8 / np.pi) * (wide + 0.044715 * wide**3))
    found = device.see(forward(name, device.bring(x))).astype(np.float64)
    info = ml_dtypes.finfo(dtype)
    unit = np.maximum(2.0 ** np.floor(np.log2(np.abs(exact) + 1e-300)), float(info.tiny)) * float(info.eps)
    wrong = np.abs(found - exact) / unit
    assert wrong.max() <= 0.55, (x[wrong.argmax()], wrong.max())


@pytest.mark.parametrize("dtype", STORAGE, ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 5), (2, 700, 3), (3, 40, 300), (5, 3000, 1)], ids=str)
def test_sums(device, dtype, shape):  # noqa: F811
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    y = device.see(sums.over_middle(device.bring(x), np.dtype(np.float64)))
    np.testing.assert_allclose(y, x.astype(np.float64).sum(1), rtol=0, atol=1e-3 if dtype != np.float64 else 1e-11)
    again = device.see(sums.over_middle(device.bring(x), np.dtype(np.float64)))
    assert y.tobytes() == again.tobytes()


def test_sums_of_several_arrays(device):  # noqa: F811
    """More than a launch has, of two dtypes: one is filled, one not given, one has so many terms that it takes two."""
    rng = np.random.default_rng(0)
    shapes = [
        (1, 3, 70),
        (2, 200, 5),
        (1, 2000, 8),
        (3, 1, 4),
        (1, 0, 6),
        (2, 128, 1),
        *[(1, n, 2) for n in range(1, 9)],
    ]
    x = [rng.standard_normal(s).astype(STORAGE[0] if n % 5 == 4 else np.float32) for n, s in enumerate(shapes)]
    outs = [np.dtype(STORAGE[0] if n == 3 else np.float32) for n in range(len(x))]
    filled = device.bring(np.full((2, 5), np.nan, np.float32))
    given = [device.bring(y) for y in x]
    found = sums.each_over_middle([*given, None], [filled if n == 1 else y for n, y in enumerate(outs)] + [None])
    assert found.pop() is None
    assert not np.isnan(device.see(filled)).any()
    for ours, out, y in zip(found, outs, x, strict=True):
        close(device.see(ours), y.astype(np.float64).sum(axis=1), out)
        assert device.see(ours).dtype == out
        alone = device.see(sums.over_middle(device.bring(y), out))
        np.testing.assert_array_equal(device.see(ours), alone)


@pytest.mark.parametrize("shape", [(), (4,), (3, 1), (3, 4), (1, 3, 1), (2, 1, 1, 4)], ids=str)
def test_sums_over_stretched_axes(device, shape):  # noqa: F811
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 4)).astype(np.float32)
    wide = x.astype(np.float64)
    lead = x.ndim - len(shape)
    axes = tuple(n for n in range(x.ndim) if n < lead or shape[n - lead] == 1)
    found = device.see(sums.sum_to(device.bring(x), shape))
    np.testing.assert_allclose(found, wide.sum(axes).reshape(shape), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", STORAGE, ids=str)
@pytest.mark.parametrize("axis", [0, 1, -2, -1])
def test_repeats(device, axis, dtype):  # noqa: F811
    """Of dense and strided arrays, while they are recorded."""
    whole = np.arange(120).reshape(4, 5, 6).astype(dtype)
    with Recorder():
        for x in (device.bring(whole), device.bring(whole)[:, ::2]):
            found = moves.namespace(None).repeat(x, 3, axis=axis)
            np.testing.assert_array_equal(device.see(found), np.repeat(device.see(x), 3, axis))


@pytest.mark.parametrize("least", [False, True])
def test_averages_by_sums_apart(device, least):  # noqa: F811
    rng = np.random.default_rng(2)
    z, k, out = (rng.standard_normal((2, 1, 3, n)).astype(np.float32) for n in (9, 9, 5))
    g, w, q_z = (rng.standard_normal((2, 1, 3, 1)).astype(np.float32) for _ in range(3))
    q_z[0, 0, 0] = -0.25  # 2 q_z + 0.5 is 0
    m = np.abs(g) * (np.arange(3) > 0)[:, None] if least else None
    q_z[0, 0, 0] = 0 if least else q_z[0, 0, 0]
    given = [device.bring(x) for x in (z, k, g, w)]
    sums = formulas.compiled("decayed_sum", given, (z.shape, z.dtype), np.float32)
    close(device.see(sums), np.exp(g.astype(np.float64)) * z + w * k, np.float32)
    each = [None if x is None else device.bring(x.astype(np.float32)) for x in (out, q_z, m)]
    found = formulas.compiled("average", each, (out.shape, out.dtype), np.float32, 2.0, 0.5)
    total = 2 * q_z.astype(np.float64)
    total = np.maximum(np.abs(total), m) if least else total + 0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        close(device.see(found), np.where(total == 0, 0, out / total), np.float32)


@pytest.mark.parametrize("kind", ["favor", "fourier"])
def test_warps_share_the_columns_of_a_product(device, kind):  # noqa: F811
    """More columns than one warp has, an odd number of them."""
    x, W = (
        np.random.default_rng(n).standard_normal(shape).astype(np.float32) for n, shape in ((0, (3, 8)), (1, (8, 75)))
    )
    columns = 150 if kind == "fourier" else 75
    found = formulas.compiled(
        kind, (device.bring(x), device.bring(W.ravel())), ((3, columns), x.dtype), x.dtype, 0.5, 0.25
    )
    angle, square = x.astype(np.float64) @ W, (x.astype(np.float64) ** 2).sum(-1, keepdims=True)
    waves = np.concatenate([0.5 * np.sin(angle), 0.5 * np.cos(angle)], -1)
    close(device.see(found), np.exp(angle - square / 8 - 0.25) if kind == "favor" else waves, np.float32)
    if device.launched is not None:
        assert dict(device.launched[-1][2])["LA_PARTS"] == 4
