"""A few tokens of Mamba-3 by kernels alone, forward and backward: twins and emulated here."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.runtime import recorder
from linattn_np.testing import relative_error
from tests.cuda import emulation
from tests.matrix_state.cuda.step_twin import stub
from tests.matrix_state.cuda.token.host import backward_by_array_calls, launched, public  # noqa: F401

BF16 = np.dtype(ml_dtypes.bfloat16)


def near(found, expected, bound):
    assert found.shape == expected.shape
    assert relative_error(np.asarray(found).astype(np.float64), expected) <= bound


def drawn(fn, B=(2,), **sizes):
    """(arrays, parts of a state): of mamba3_mimo with three rows a token."""
    rng, rows = np.random.default_rng(0), (3,) if fn is la.mamba3_mimo else ()
    x = la.testing.sample(fn, rng, B=B, H=2, **sizes, **({"R": 3} if rows else {}))
    K, V = sizes["K"], sizes["V"]
    return x, [rng.standard_normal((2, 2, *n)).astype(np.float32) for n in ((K, V), (*rows, K), (*rows, V))]


EACH = pytest.mark.parametrize("fn", [la.mamba3, la.mamba3_mimo], ids=lambda fn: fn.__name__)
ROWS = ("x", "B", "C", "angle", "z")


@EACH
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
@pytest.mark.parametrize("more", [("D", "z", "mimo_z"), ("z",), ()], ids=str)
def test_a_few_tokens(public, monkeypatch, fn, dtype, T, more):  # noqa: F811
    """With a state, and the gradient of the final one."""
    entries, run = [], emulation.compiled
    monkeypatch.setattr(emulation, "compiled", lambda *how: entries.append(how[:2]) or run(*how))
    backward_by_array_calls(monkeypatch)
    rng, (wide, state) = np.random.default_rng(1), drawn(fn, T=T, K=8, V=8)
    optional = ("D", "z", "mimo_z")
    wide = {n: y.astype(dtype).astype(np.float64) for n, y in wide.items() if n not in optional or n in more}
    given = {n: stub(y.astype(dtype)) for n, y in wide.items()}
    found, pull = la.vjp(fn, **given, state=la.Mamba3State(*map(stub, state)), return_state=True)
    exact, back = la.vjp(fn, **wide, state=la.Mamba3State(*(S.astype(np.float64) for S in state)),
                         return_state=True, backend="reference")  # fmt: skip
    bound = 2.0**-6 if dtype == BF16 else 1e-5
    near(found[0], exact[0], bound)
    for y, z in zip(found[1], exact[1], strict=True):
        near(y, z, bound)
    dout = rng.standard_normal(exact[0].shape).astype(dtype).astype(np.float64)
    grads, expected = pull(stub(dout.astype(dtype)), found[1]), back(dout, exact[1])
    for name, y in expected._asdict().items():
        one, other = ((z if isinstance(z, tuple) else (z,)) for z in (getattr(grads, name), y))
        for a, b in zip(one, other, strict=True):
            if b is not None:
                near(a, b, 2 * bound)
    own = {entry for _, entry in entries}
    expected = {"late_rows", "late_rows_vjp", "angle_sums_vjp", "settle"}
    assert expected | ({"read_out", "read_out_vjp"} if fn is la.mamba3_mimo else set()) <= own


@EACH
@pytest.mark.parametrize("how", [{}, {"return_state": True}, {"overwrite_state": True}], ids=str)
def test_one_token_is_replayed(public, monkeypatch, fn, how):  # noqa: F811
    """All that it does on the device are launches, however large the state: its bits are those of the first call."""
    monkeypatch.setattr(recorder, "MOST_BYTES", 4096)
    x, state = drawn(fn, T=1, K=32, V=32)
    given = {n: stub(y.astype(BF16 if n in ROWS else np.float32)) for n, y in x.items()}
    states = [la.Mamba3State(*(stub(S.copy()) for S in state)) for _ in range(3)]
    each = [fn(**given, state=S, **how) for S in states]
    assert la.explain(fn, **given, state=la.Mamba3State(*map(stub, state)), **how).replay == "replayed"
    outs = [np.asarray(y[0] if how.get("return_state") else y) for y in each]
    assert outs[0].tobytes() == outs[1].tobytes() == outs[2].tobytes()
    if "overwrite_state" in how:
        ends = fn(**given, state=la.Mamba3State(*map(stub, state)), return_state=True)[1]
        for found in states:
            for S, other in zip(found, ends, strict=True):
                assert np.asarray(S).tobytes() == np.asarray(other).tobytes()


@EACH
@pytest.mark.parametrize("begun", [True, False])
def test_many_tokens_are_replayed(public, monkeypatch, fn, begun):  # noqa: F811
    """Rows that the kernels write live as long as the call: they may be large."""
    monkeypatch.setattr(recorder, "MOST_BYTES", 4096)
    x, state = drawn(fn, T=12 if fn is la.mamba3 else 4, K=32, V=32)
    given = {n: stub(y.astype(BF16 if n in ROWS else np.float32)) for n, y in x.items()}
    more = {"state": la.Mamba3State(*map(stub, state))} if begun else {}
    first, again = (np.asarray(fn(**given, **more)) for _ in range(2))
    assert la.explain(fn, **given, **more).replay == "replayed"
    assert first.tobytes() == again.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "K"), [(1, 64), (2, 128), (4, 128), (4, 256), (8, 64)])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
def test_several_rows_a_token(dtype, R, K):
    """Of a prompt in chunks against the same numbers on a CPU; gradients of float32."""
    cp = pytest.importorskip("cupy")
    x = la.testing.sample(la.mamba3_mimo, np.random.default_rng(0), B=(2,), T=97, H=4, Hk=2, Hq=1, K=K, V=64, R=R)
    x = {n: y.astype(dtype if n in ROWS else np.float32) for n, y in x.items()}
    wide = {n: y.astype(np.float64) for n, y in x.items()}
    out, pull = la.vjp(la.mamba3_mimo, **{n: cp.asarray(y) for n, y in x.items()}, dt_softplus=True)
    exact, back = la.vjp(la.mamba3_mimo, **wide, dt_softplus=True)
    assert out.dtype == dtype
    near(cp.asnumpy(out), exact, 200 * 2.0**-23 if dtype != BF16 else 4 * 2.0**-8)
    if dtype == BF16:
        return
    for y, z in zip(pull(out), back(cp.asnumpy(out).astype(np.float64)), strict=True):
        if z is not None:
            near(cp.asnumpy(y), z, 200 * 2.0**-23)
