"""A few tokens of Mamba-3 by kernels alone, forward and backward: twins and emulated here."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.ops.cuda import trapezoid
from linattn_np.runtime import recorder
from linattn_np.testing import relative_error
from tests.cuda import emulation
from tests.matrix_state.cuda.step_twin import stub
from tests.matrix_state.cuda.token.host import backward_by_array_calls, launched, public  # noqa: F401

BF16 = np.dtype(ml_dtypes.bfloat16)


def near(found, expected, bound):
    assert found.shape == expected.shape
    assert relative_error(np.asarray(found).astype(np.float64), expected) <= bound


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
@pytest.mark.parametrize("more", [("D", "z"), ("z",), ()], ids=str)
def test_a_few_tokens(public, monkeypatch, dtype, T, more):  # noqa: F811
    """With a state, and the gradient of the final one."""
    entries, run = [], emulation.compiled
    monkeypatch.setattr(emulation, "compiled", lambda *how: entries.append(how[:2]) or run(*how))
    backward_by_array_calls(monkeypatch)
    rng = np.random.default_rng(0)
    wide = la.testing.sample(la.mamba3, rng, B=(2,), T=T, H=2, K=8, V=8)
    wide = {n: y.astype(dtype).astype(np.float64) for n, y in wide.items() if n not in ("D", "z") or n in more}
    state = la.Mamba3State(*(rng.standard_normal((2, 2, *n)).astype(np.float32) for n in ((8, 8), (8,), (8,))))
    given = {n: stub(y.astype(dtype)) for n, y in wide.items()}
    found, pull = la.vjp(la.mamba3, **given, state=la.Mamba3State(*map(stub, state)), return_state=True)
    exact, back = la.vjp(la.mamba3, **wide, state=la.Mamba3State(*(S.astype(np.float64) for S in state)),
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
    own = {entry for file, entry in entries if file == trapezoid.SOURCE}
    assert {"late_rows", "late_rows_vjp", "angle_sums_vjp", "settle"} <= own


@pytest.mark.parametrize("how", [{}, {"return_state": True}, {"overwrite_state": True}], ids=str)
def test_one_token_is_replayed(public, monkeypatch, how):  # noqa: F811
    """All that it does on the device are launches, however large the state: its bits are those of the first call."""
    monkeypatch.setattr(recorder, "MOST_BYTES", 4096)
    rng = np.random.default_rng(1)
    x = la.testing.sample(la.mamba3, rng, B=(2,), T=1, H=2, K=32, V=32)
    given = {n: stub(y.astype(BF16 if n in ("x", "B", "C", "angle", "z") else np.float32)) for n, y in x.items()}
    state = [rng.standard_normal((2, 2, *n)).astype(np.float32) for n in ((32, 32), (32,), (32,))]
    states = [la.Mamba3State(*(stub(S.copy()) for S in state)) for _ in range(3)]
    each = [la.mamba3(**given, state=S, **how) for S in states]
    assert la.explain(la.mamba3, **given, state=la.Mamba3State(*map(stub, state)), **how).replay == "replayed"
    outs = [np.asarray(y[0] if how.get("return_state") else y) for y in each]
    assert outs[0].tobytes() == outs[1].tobytes() == outs[2].tobytes()
    if "overwrite_state" in how:
        ends = la.mamba3(**given, state=la.Mamba3State(*map(stub, state)), return_state=True)[1]
        for found in states:
            for S, other in zip(found, ends, strict=True):
                assert np.asarray(S).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("begun", [True, False])
def test_many_tokens_are_replayed(public, monkeypatch, begun):  # noqa: F811
    """Rows that the kernels write live as long as the call: they may be large."""
    monkeypatch.setattr(recorder, "MOST_BYTES", 4096)
    rng = np.random.default_rng(2)
    x = la.testing.sample(la.mamba3, rng, B=(2,), T=12, H=2, K=32, V=32)
    given = {n: stub(y.astype(BF16 if n in ("x", "B", "C", "angle", "z") else np.float32)) for n, y in x.items()}
    state = [rng.standard_normal((2, 2, *n)).astype(np.float32) for n in ((32, 32), (32,), (32,))]
    more = {"state": la.Mamba3State(*map(stub, state))} if begun else {}
    first, again = (np.asarray(la.mamba3(**given, **more)) for _ in range(2))
    assert la.explain(la.mamba3, **given, **more).replay == "replayed"
    assert first.tobytes() == again.tobytes()
