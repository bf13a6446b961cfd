"""Residuals of a vector decay: stored or recomputed, they give the same output and accurate gradients."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.types import Erase
from tests.matrix_state.cuda.device_arrays import error, same
from tests.matrix_state.cuda.vector.test_kernels import BY_READ, draw, name_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["mild", "mixed"])
@pytest.mark.parametrize("fn", [fn for fn in BY_READ if fn.spec.erase is Erase.NONE], ids=name_of)
def test_stored_and_recomputed_residuals_give_the_same_bits(cp, monkeypatch, fn, kind, gate):
    arrays, state = draw(fn, T=300, kind=kind, gate=gate)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    out, pull = la.vjp(fn, **there, state=cp.asarray(state), backend="cuda")
    monkeypatch.setattr(la.config, "cuda_saved_mib", 0)
    again, pull_again = la.vjp(fn, **there, state=cp.asarray(state), backend="cuda")
    assert same(out, again)
    assert not same(out, fn(**there, state=cp.asarray(state), backend="cuda"))
    dout = cp.asarray(arrays["v"])
    assert all(same(x, y) for x, y in zip(pull(dout), pull_again(dout), strict=True) if x is not None)


@pytest.mark.parametrize("drawn", ["normal", "whole numbers"])
@pytest.mark.parametrize(("fn", "widths"), [(la.gla, (128, 128)), (la.rwkv6, (128, 128)), (la.rwkv6, (64, 40))])
def test_gate_gradients_without_decay(cp, fn, widths, drawn):
    """Nearly all are states times their gradients, of 20 bits each; whole numbers are often half way in bfloat16."""
    arrays, _ = draw(fn, B=1, T=1023, K=widths[0], V=widths[1], kind="mild", gate="float32")
    rng = np.random.default_rng(3)
    dout = rng.standard_normal(arrays["v"].shape)
    if drawn == "whole numbers":
        arrays |= {n: np.where(arrays[n] < 0, -1, 1).astype(arrays[n].dtype) for n in "qk"}
        arrays["v"], dout = (rng.integers(-64, 65, arrays["v"].shape).astype(arrays["v"].dtype) for _ in range(2))
    dout, arrays["g"] = dout.astype(arrays["v"].dtype), np.zeros_like(arrays["g"])
    there, wide = ({n: f(x) for n, x in arrays.items()} for f in (cp.asarray, lambda x: x.astype(np.float64)))
    found = la.vjp(fn, **there, scale=1.0, backend="cuda")[1](cp.asarray(dout))
    right = la.vjp(fn, **wide, scale=1.0)[1](dout.astype(np.float64))
    assert error(found.g, right.g) < 1e-3  # 1.9e-3 of states in bfloat16
