"""Large calls of narrow or complex numbers are computed some tokens at a time: call/parts.py."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import parts
from tests.cases import peak_memory

pytest.importorskip("numba")

NAMES = [fn.__name__ for fn in la.VARIANTS if fn.spec.change.by_tokens]
B, T, D = 2, 48, 6


@pytest.fixture
def small(monkeypatch):
    """Calls of these tests are large."""
    monkeypatch.setattr(parts, "LEAST", 1)
    monkeypatch.setattr(parts, "TOKENS", 16)


def has_tokens(name: str, array: str) -> bool:
    return getattr(la, name).spec.arrays[array].axes.startswith("T")


def drawn(name: str, dtype: type) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Arrays and state, and cotangents of the results."""
    rng = np.random.default_rng(0)
    fn, sizes = getattr(la, name), {"H": 2, "K": 3, "V": 4, "D": D, "N": 3}
    x = {n: np.asarray(y) for n, y in la.testing.sample(fn, rng, B=(B,), T=T, **sizes).items()}
    wide = np.float64 if dtype is np.float64 else np.float32
    x = {n: y.astype(np.result_type(wide, 1j) if y.dtype.kind == "c" else dtype if has_tokens(name, n) else wide)
         for n, y in x.items()}  # fmt: skip
    out, state = fn(**x, return_state=True)
    like = lambda y: (rng.standard_normal(y.shape) + 1j * rng.standard_normal(y.shape)).astype(y.dtype)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        dstate = type(state)(*map(like, state)) if isinstance(state, tuple) else like(state)
        return x | {"state": state}, {"dout": like(out), "dstate": dstate}


def leaves(x) -> list[np.ndarray]:
    return [z for y in x for z in leaves(y)] if isinstance(x, tuple) else [x]


def pulled(name: str, x: dict, given: dict):
    (out, state), pullback = la.vjp(getattr(la, name), **x, return_state=True)
    return (out, state), pullback(**given)


def test_variants():
    gates = {"hgrn", "lru", "min_gru", "min_lstm", "rg_lru"}
    assert set(NAMES) == gates | {"diagonal_longhorn", "matrix_gate", "rfa", "s4d", "selective_scan"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_bits_are_those_of_a_whole_call(name, dtype, monkeypatch):
    """Those of sums over all tokens are close: the parts are summed one after the other."""
    x, given = drawn(name, dtype)
    whole = pulled(name, x, given)
    plain = getattr(la, name)(**x)
    monkeypatch.setattr(parts, "LEAST", 1)
    monkeypatch.setattr(parts, "TOKENS", 16)
    found = pulled(name, x, given)
    for y, z in zip(leaves(whole[0]), leaves(found[0]), strict=True):
        np.testing.assert_array_equal(y, z)
    np.testing.assert_array_equal(plain, getattr(la, name)(**x))
    explained = la.explain(getattr(la, name), **x)
    assert "3 parts of the tokens" in explained.reason
    assert "some tokens" in explained.replay
    for n, y in whole[1]._asdict().items():
        z = getattr(found[1], n)
        if y is None:
            assert z is None
        elif n == "state" or has_tokens(name, n):
            for a, b in zip(leaves(y), leaves(z), strict=True):
                np.testing.assert_array_equal(a, b)
                assert a.dtype == b.dtype
        else:
            np.testing.assert_allclose(z, y, rtol=1e-4, atol=1e-5 * np.abs(y).max())
            assert y.dtype == z.dtype


@pytest.mark.parametrize("name", ["selective_scan", "matrix_gate"])
def test_outputs_that_gradients_read_are_those_of_the_part(name, small):
    """bfloat16 against float64: the gradients of z and of queries."""
    x, given = drawn(name, ml_dtypes.bfloat16)
    wide = {n: y.astype(np.float64) for n, y in x.items()}
    found, exact = pulled(name, x, given)[1], pulled(name, wide, {n: y.astype(np.float64) for n, y in given.items()})[1]
    assert "parts of the tokens" in la.explain(getattr(la, name), **x).reason
    for n, y in exact._asdict().items():
        assert la.testing.relative_error(getattr(found, n).astype(np.float64), y) < 2**-6, n


@pytest.mark.parametrize("without", ["dout", "dstate", None])
def test_gradients_are_central_differences(without, small):
    name = "lru"
    x, given = drawn(name, np.float64)
    given = {n: None if n == without else y for n, y in given.items()}
    assert "3 parts" in la.explain(getattr(la, name), **x).reason
    grads = pulled(name, x, given)[1]
    rng = np.random.default_rng(1)

    def loss(arrays: dict) -> float:
        out, state = getattr(la, name)(**arrays, return_state=True)
        each = [(given["dout"], out), (given["dstate"], state)]
        return sum(float(np.sum((np.conj(d) * y).real)) for d, y in each if d is not None)

    for n, y in x.items():
        e = rng.standard_normal(y.shape)
        e = e + 1j * rng.standard_normal(y.shape) if y.dtype.kind == "c" else e
        near = (loss(x | {n: y + 1e-6 * e}) - loss(x | {n: y - 1e-6 * e})) / 2e-6
        along = float(np.sum((np.conj(getattr(grads, n)) * e).real))
        assert along == pytest.approx(near, rel=1e-6, abs=1e-6), n


def test_what_is_computed_as_a_whole(small):
    """Real numbers of the computation's own dtype, ragged batches, states in place or at positions, other backends."""
    x, _ = drawn("rg_lru", ml_dtypes.bfloat16)
    own = {n: y for n, y in x.items() if n != "state"}
    ragged = {n: y[:1] if y.ndim == 3 else y for n, y in own.items()}
    for arrays, options in (({n: y.astype(np.float32) for n, y in own.items()}, {}), (x, {"overwrite_state": True}),
                            (ragged, {"cu_seqlens": [0, 30, T]}), (x, {"return_states_at": [5]}),
                            (own, {"backend": "chunks"})):  # fmt: skip
        assert "parts of the tokens" not in la.explain(la.rg_lru, **arrays, **options).reason
    assert "parts of the tokens" in la.explain(la.rg_lru, **own).reason


def test_a_changed_input_is_an_error(small):
    x, given = drawn("rg_lru", ml_dtypes.bfloat16)
    pullback = la.vjp(la.rg_lru, **x)[1]
    x["r"][...] = 0
    with pytest.raises(RuntimeError, match="r was changed in place"):
        pullback(given["dout"])


MEMORY = [
    ("rg_lru", 2.6),
    ("min_gru", 2.8),
    ("hgrn", 2.8),
    ("min_lstm", 2.4),
    ("selective_scan", 5),
    ("matrix_gate", 5),
    ("diagonal_longhorn", 3.2),
]


@pytest.mark.parametrize(("name", "most"), MEMORY)
def test_memory(name, most, monkeypatch):
    """Peak beside the inputs over their bytes, of forward and backward."""
    monkeypatch.setattr(parts, "LEAST", 1 << 16)
    fn, rng = getattr(la, name), np.random.default_rng(0)
    sizes = {"T": 4096, "D": 256, "N": 16, "H": 1, "Hq": 1, "Hk": 1, "K": 16, "V": 16}
    x = {}
    for m, arg in fn.spec.arrays.items():
        axes = arg.axes.split("|")[0].split()
        shape = (*(1,) * ("T" in axes), *(sizes[a] for a in axes))
        x[m] = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
    x |= {m: y if m not in ("g", "A", "dt") else abs(y) if m == "dt" else -abs(y) for m, y in x.items()}

    def call() -> object:
        out, pullback = la.vjp(fn, **x)
        return pullback(out)

    call()
    la.clear_cache()
    assert peak_memory(call) < most * sum(y.nbytes for y in x.values())
