"""Large calls of several rows a token, or of features, are computed some heads at a time: call/head_parts.py."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import head_parts
from linattn_np.runtime.shapes import flatten
from tests.cases import peak_memory

pytest.importorskip("numba")

SIZES = {"T": 37, "H": 4, "K": 8, "V": 6, "R": 3, "P": 2}
GROUPS = [{"Hk": 1, "Hq": 1}, {"Hk": 4, "Hq": 2}, {"Hk": 2, "Hq": 2}]


@pytest.fixture
def small(monkeypatch):
    """Calls of these tests are large."""
    for name in ("LEAST", "FEWEST"):
        monkeypatch.setattr(head_parts, name, 1)


def drawn(dtype: type, batch: int, groups: dict, **sizes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    own = SIZES | groups | sizes
    x = la.testing.sample(la.mamba3_mimo, rng, B=(batch,), **own)
    shared = {"B": own["Hk"], "C": own["Hq"]}
    x |= {n: np.ascontiguousarray(x[n][..., :1, :].repeat(m, -2) * rng.uniform(0.5, 1, (m, 1)))
          for n, m in shared.items()}  # fmt: skip
    return {n: y.astype(dtype if y.ndim > 3 else np.result_type(dtype, np.float32)) for n, y in x.items()}


def state_of(x: dict[str, np.ndarray], **options):
    return la.mamba3_mimo(**x, return_state=True, **options)[1]


def pulled(x: dict, with_state: bool = True, **options):
    (out, end), pullback = la.vjp(la.mamba3_mimo, **x, return_state=True, **options)
    rng = np.random.default_rng(1)
    d = [rng.standard_normal(y.shape).astype(y.dtype) for y in (out, *end)]
    return (out, *end), pullback(d[0], type(end)(*d[1:]) if with_state else None)


def leaves(grads) -> dict[str, np.ndarray]:
    each = grads._asdict()
    state = each.pop("state")
    return each | ({} if state is None else {f"state.{n}": y for n, y in state._asdict().items()})


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize(("dtype", "eps"), [(np.float32, 1e-6), (ml_dtypes.bfloat16, 2**-8)])
@pytest.mark.parametrize("options", [{}, {"cu_seqlens": [0, 9, 9, 37]}], ids=str)
def test_it_is_the_whole_call(groups, dtype, eps, options, monkeypatch):
    """Results and gradients of a head to the bit, of what heads share up to the order of a sum."""
    x = drawn(dtype, 1 if options else 2, groups)
    x["state"] = state_of(x, **options)
    whole, grads = pulled(x, **options)
    plain = la.mamba3_mimo(**x, **options)
    for name in ("LEAST", "FEWEST"):
        monkeypatch.setattr(head_parts, name, 1)
    assert (
        f"{4 if groups['Hk'] != 2 and groups['Hq'] != 2 else 2} parts"
        in la.explain(la.mamba3_mimo, **x, **options).reason
    )
    found, again = pulled(x, **options)
    for y, z in zip((*whole, plain), (*found, la.mamba3_mimo(**x, **options)), strict=True):
        np.testing.assert_array_equal(y, z)
    each = leaves(again)
    for n, y in leaves(grads).items():
        z = each[n]
        assert (y.dtype, y.shape) == (z.dtype, z.shape)
        if n in ("B", "C"):
            y, z = y.astype(np.float64), z.astype(np.float64)
            np.testing.assert_allclose(z, y, rtol=eps, atol=eps * np.abs(y).max())
        else:
            np.testing.assert_array_equal(y, z, err_msg=n)


@pytest.mark.parametrize("name", ["based", "rebased"])
@pytest.mark.parametrize("normalize", [True, False])
def test_features_of_16_bits(name, normalize, monkeypatch):
    """To the bit, but for weights that heads share; calls of float32 have no parts."""
    fn, rng = getattr(la, name), np.random.default_rng(0)
    x = la.testing.sample(fn, rng, B=(2,), T=37, H=4, K=4, V=6)
    x = {n: y.astype(ml_dtypes.bfloat16 if y.ndim > 3 else np.float32) for n, y in x.items()}
    x["state"] = fn(**x, normalize=normalize, return_state=True)[1]

    def called() -> list[np.ndarray]:
        (out, end), pullback = la.vjp(fn, **x, normalize=normalize, return_state=True)
        return [out, *flatten("", end).values()], pullback(out, end)._asdict()

    results, grads = called()
    for each in ("LEAST", "FEWEST"):
        monkeypatch.setattr(head_parts, each, 1)
    assert "4 parts of the heads" in la.explain(fn, **x, normalize=normalize).reason
    wide = {n: y.astype(np.float32) for n, y in x.items() if n != "state"}
    assert "parts of the heads" not in la.explain(fn, **wide).reason
    found, again = called()
    for y, z in zip(results, found, strict=True):
        np.testing.assert_array_equal(y, z)
    for n, d in grads.items():
        if n in ("gamma", "shift"):
            np.testing.assert_allclose(again[n], d, rtol=1e-4, atol=1e-5 * np.abs(d).max())
        else:
            for y, z in zip(flatten("", d).values(), flatten("", again[n]).values(), strict=True):
                np.testing.assert_array_equal(y, z, err_msg=n)


@pytest.mark.parametrize("groups", GROUPS[:2], ids=str)
def test_gradients_are_central_differences(groups, small):
    x = drawn(np.float64, 2, groups)
    x["state"] = state_of(x)
    assert "parts of the heads" in la.explain(la.mamba3_mimo, **x).reason
    la.testing.check_vjp(la.mamba3_mimo, **x)


def test_parts_are_alike_whatever_the_batch_is(monkeypatch):
    monkeypatch.setattr(head_parts, "LEAST", 37 * 8 * 2)
    reasons = {la.explain(la.mamba3_mimo, **drawn(np.float32, n, GROUPS[0])).reason for n in (1, 2, 5)}
    assert len(reasons) == 1
    assert "2 parts of the heads" in reasons.pop()


def test_cotangents_are_checked(small):
    x = drawn(np.float32, 1, GROUPS[0])
    (out, end), pullback = la.vjp(la.mamba3_mimo, **x, return_state=True)
    for d, error in (((None, None), TypeError), ((out[:, 1:], None), ValueError), ((None, end.S), TypeError),
                     ((None, end._replace(k=end.k[:, :2])), ValueError)):  # fmt: skip
        with pytest.raises(error, match=r"^mamba3_mimo: .*expected"):
            pullback(*d)
    x["x"][...] = 0
    with pytest.raises(RuntimeError, match="x was changed in place"):
        pullback(out)


def test_memory(monkeypatch):
    """Peak beside the inputs over their bytes, of forward and backward: of a whole call 16 times."""
    monkeypatch.setattr(head_parts, "LEAST", 1 << 12)
    x = drawn(np.float32, 1, {"Hk": 1, "Hq": 1}, T=512, H=16, K=32, V=32, P=8, R=4)

    def call() -> object:
        out, pullback = la.vjp(la.mamba3_mimo, **x)
        return pullback(out)

    call()
    la.clear_cache()
    assert peak_memory(call) < 5 * sum(y.nbytes for y in x.values())
