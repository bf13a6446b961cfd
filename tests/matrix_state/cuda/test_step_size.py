"""Mamba-2 on a GPU, with separate kernels for step size, skip and gate, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from tests.matrix_state.cuda.scan.test_kernels import DTYPES, FORWARD, GATES

from .device_arrays import check_made_again, error, same, typed

pytestmark = pytest.mark.gpu
SUMS = ("ddt", "dD")  # gradients that are sums, which cancel, as dg is: its bound; the others: two roundings


def draw(dtype, B=(2,), T=97, Hq=2, Hk=2, H=4, K=32, V=48, parts="Dz+", seed=0, states=None):
    """(arrays by name, state, dout, dstate); parts: which of D, z and dt_bias (+) there are."""
    rng = np.random.default_rng(seed)
    x = {"x": rng.standard_normal((*B, T, H, V)).astype(typed(dtype)),
         "dt": rng.standard_normal((*B, T, H)).astype(typed(dtype)), "A": -rng.uniform(0.05, 1, H).astype(np.float32),
         "B": (rng.standard_normal((*B, T, Hk, K)) / np.sqrt(K)).astype(typed(dtype)),
         "C": rng.standard_normal((*B, T, Hq, K)).astype(typed(dtype))}  # fmt: skip
    if "D" in parts:
        x["D"] = rng.standard_normal(H).astype(np.float32)
    if "z" in parts:
        x["z"] = rng.standard_normal((*B, T, H, V)).astype(typed(dtype))
    if "+" in parts:
        x["dt_bias"] = rng.standard_normal(H).astype(np.float32)
    state, dstate = rng.standard_normal((2, *(states or B), H, K, V)).astype(np.float32)
    return x, state, rng.standard_normal((*B, T, H, V)).astype(typed(dtype)), dstate


def run(arrays, state, dout, dstate, **options):
    """Results and gradients by name."""
    result, pull = la.vjp(la.mamba2, **arrays, state=state, return_state=True, **options)
    grads = pull(dout, dstate)._asdict()
    return result._asdict() | {f"d{n}": y for n, y in grads.items() if y is not None}


def terms(x, state, dout, dstate, dt_softplus, dt_limit=(0, np.inf), cu_seqlens=None):
    """dg dt of every token and head, whose sums are the gradient of A, in float64."""
    raw = x["dt"] + x.get("dt_bias", 0.0)
    dt = np.clip(np.logaddexp(0, raw) if dt_softplus else raw, *dt_limit)
    core = dout * x["z"] / (1 + np.exp(-x["z"])) if "z" in x else dout
    arrays = (x["C"], x["B"], dt[..., None] * x["x"], dt * x["A"])
    _, pull = la.vjp(la.simple_gla, *arrays, state=state, scale=1.0, cu_seqlens=cu_seqlens)
    return pull(core, dstate).g * dt


def compare(cp, dtype, drawn, **options):
    arrays, state, dout, dstate = drawn
    x, *wide = ({n: y.astype(np.float64) for n, y in arrays.items()},
                *(y.astype(np.float64) for y in (state, dout, dstate)))  # fmt: skip
    options = {"dt_softplus": True} | options
    expected = run(x, *wide, **options)
    there = {n: cp.asarray(y) for n, y in arrays.items()}
    assert la.explain(la.mamba2, **there, state=cp.asarray(state), **options).backend == "cuda"
    found = run(there, *map(cp.asarray, (state, dout, dstate)), **options)
    assert found["out"].dtype == dout.dtype
    share = {n: error(found[n], y) / (GATES[dtype] if n in SUMS else 2 * FORWARD[dtype]) for n, y in expected.items()}
    each = {"dA": terms(x, *wide, **options), "ddt_bias": expected["ddt"]}
    for n in each.keys() & expected.keys():  # sums over tokens, which cancel: of the sums of their terms' sizes
        size = np.linalg.norm(np.abs(each[n]).sum(axis=tuple(range(each[n].ndim - 1))))
        share[n] = error(found[n], expected[n]) * np.linalg.norm(expected[n]) / size / GATES[dtype]
    assert max(share.values()) <= 1, {n: float(e) for n, e in share.items() if e > 1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", ["", "D", "z", "+", "Dz+"])
@pytest.mark.parametrize("T", [1, 5, 97])
def test_every_part(cp, dtype, parts, T):
    compare(cp, dtype, draw(dtype, T=T, parts=parts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "V"), [(1, 1), (7, 60), (64, 64), (128, 128), (128, 33), (16, 256)])
def test_widths(cp, dtype, K, V):
    compare(cp, dtype, draw(dtype, K=K, V=V, T=70))


@pytest.mark.parametrize(
    "options", [{"dt_softplus": False}, {"dt_limit": (0.3, 1.0)}, {"dt_softplus": False, "dt_limit": (0.1, 0.9)}]
)
def test_limits(cp, options):
    drawn = draw("bfloat16")
    drawn[0]["dt"] = np.abs(drawn[0]["dt"].astype(np.float32)).astype(typed("bfloat16"))
    drawn[0].pop("dt_bias")
    compare(cp, "bfloat16", drawn, **options)


def test_ragged_segments_and_one_group(cp):
    compare(cp, "bfloat16", draw("bfloat16", B=(1,), T=130, states=(3,)), cu_seqlens=[0, 60, 60, 130])
    compare(cp, "bfloat16", draw("bfloat16", B=(1,), T=1700, Hq=1, Hk=1, K=128, V=64))
    compare(cp, "bfloat16", draw("bfloat16", B=(2, 3), T=20))
    compare(cp, "bfloat16", draw("bfloat16", B=(), T=300))


def test_layouts(cp):
    """Heads first, and rows that lie apart: the same numbers."""
    arrays, _, dout, _ = draw("bfloat16")
    there = {n: cp.asarray(y) for n, y in arrays.items()}
    out, pull = la.vjp(la.mamba2, **there, dt_softplus=True)
    grads = pull(cp.asarray(dout))
    turned = {n: cp.ascontiguousarray(cp.moveaxis(y, 1, 2)) if y.ndim > 2 else y for n, y in there.items()}
    out2, pull2 = la.vjp(la.mamba2, **turned, dt_softplus=True, layout="heads_first")
    assert same(cp.moveaxis(out2, 1, 2), out)
    for n, y in pull2(cp.moveaxis(cp.asarray(dout), 1, 2))._asdict().items():
        if y is not None:
            assert same(cp.moveaxis(y, 1, 2) if y.ndim > 2 else y, getattr(grads, n)), n
    apart = {n: cp.repeat(y, 2, axis=-1)[..., ::2] if y.ndim > 2 else y for n, y in there.items()}
    assert same(la.mamba2(**apart, dt_softplus=True), out)


def test_nan_stays_in_its_head(cp):
    arrays, *_ = draw("bfloat16", parts="")
    there = {n: cp.asarray(y) for n, y in arrays.items()}
    there["dt"][0, 40, 1] = np.nan
    bad = cp.isnan(la.mamba2(**there, dt_softplus=True).astype(np.float32)).any(axis=-1).get()
    assert bad[0, 40:, 1].all()
    assert bad.sum() == bad[0, :, 1].sum()


@pytest.mark.parametrize("parts", ["", "D", "z", "Dz+"])
@pytest.mark.parametrize("T", [1, 97, 1700])
def test_made_again(cp, monkeypatch, parts, T):
    """Forward alone; forward and pullback."""

    def every(one):
        arrays, dout = one
        out, pull = la.vjp(la.mamba2, **arrays, dt_softplus=True)
        return [la.mamba2(**arrays, dt_softplus=True), out, *(y for y in pull(dout) if y is not None)]

    sets = []
    for seed in range(3):
        arrays, _, dout, _ = draw("bfloat16", B=(1,), T=T, Hq=4, Hk=4, seed=seed, parts=parts)
        arrays = {n: y.astype(np.float32) if n == "dt" else y for n, y in arrays.items()}
        sets.append(({n: cp.asarray(y) for n, y in arrays.items()}, cp.asarray(dout)))
    check_made_again(cp, monkeypatch, every, sets, kept=2)
