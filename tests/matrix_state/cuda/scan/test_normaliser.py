"""Sums of weights beside the passes, and the quotient: kernels, emulated here or on a GPU, against float64."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import array_api_compat
import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state import core as matrix_state
from linattn_np.matrix_state.cuda.scan import calls, normaliser
from linattn_np.matrix_state.readouts import averages
from linattn_np.matrix_state.types import Inputs, Plan
from linattn_np.runtime.cuda import launch
from linattn_np.runtime.shapes import Sequence
from tests.cases import parts
from tests.cuda.emulation import device, emulated, public  # noqa: F401
from tests.matrix_state.cuda.step_twin import Stub

BFLOAT16, SCALE = np.dtype(ml_dtypes.bfloat16), 0.3
BOUNDS = {"float32": 2e-5, "bfloat16": 2.0**-7}
# heads of q, k, v and g, 0: no decay; key and value width; tokens or offsets
CASES = {
    "plain": ((2, 2, 2, 2), 12, 16, 140, "float32"),
    "no decay": ((2, 2, 2, 0), 12, 16, 20, "float32"),
    "odd widths": ((1, 1, 1, 1), 7, 5, 33, "float32"),
    "two warps": ((1, 1, 2, 1), 132, 136, 17, "float32"),
    "more queries": ((4, 1, 2, 2), 12, 16, 131, "float32"),
    "fewer queries": ((1, 2, 4, 2), 12, 16, 19, "float32"),
    "parts": ((1, 1, 1, 1), 12, 16, 385, "float32"),
    "narrow": ((2, 2, 2, 2), 16, 8, 130, "bfloat16"),
    "ragged": ((2, 1, 2, 2), 12, 16, (0, 0, 3, 140, 140, 277), "float32"),
    "ragged narrow": ((2, 2, 2, 2), 16, 8, (0, 129, 257), "bfloat16"),
}


def sequences_of(T):
    if not isinstance(T, tuple):
        return [Sequence(None, 0, T)]
    return [Sequence(n, a, b) for n, (a, b) in enumerate(pairwise(T))]


def drawn(case, seed=0):
    """(arrays by name, sequences, dtype) of a case; gates that reset, weights and signed sums."""
    (Hq, Hk, H, Hg), K, V, T, dtype = CASES[case]
    rng, sequences = np.random.default_rng(seed), tuple(sequences_of(T))
    T, heads, B = sequences[-1].stop, max(Hq, H), 2 if sequences[0].row is None else 1
    N, normal = B if sequences[0].row is None else len(sequences), rng.standard_normal
    x = {"q": normal((B, T, Hq, K)), "k": normal((B, T, Hk, K)), "v": normal((B, T, H, V)),
         "num": normal((B, T, heads, V)), "dout": normal((B, T, heads, V)),
         "w": rng.uniform(0, 1, (B, T, H)), "least": rng.uniform(0, 1, (B, T, H)), "z": normal((N, H, K)),
         "dz": normal((N, H, K)), "dq": normal((B, T, Hq, K)), "dk": normal((B, T, Hk, K)),
         "dv": normal((B, T, H, V))}  # fmt: skip
    if Hg:
        x["g"] = -rng.exponential(0.2, (B, T, Hg, 1))
        x["g"][rng.uniform(size=x["g"].shape) < 0.04] = -np.inf
        x["dg"] = normal((B, T, Hg, 1))
    wide = {"w", "least", "z", "dz", "g", "dg"}
    return {n: y.astype(np.float32 if n in wide else dtype) for n, y in x.items()}, sequences, dtype


def shared(y, heads):
    return np.repeat(y, heads // y.shape[2], axis=2)


def in_float64(x, sequences, eps, least):
    """(out, last z, d num, d q, d k, d g, d w, d z_0) token by token; gradients of q, k and g without x's own."""
    x = {n: y.astype(np.float64) for n, y in x.items()}
    heads, (B, T, H, _) = x["num"].shape[2], x["v"].shape
    decay = shared(np.exp(x["g"]) if "g" in x else np.ones((B, T, 1, 1)), H)
    q, k, w = shared(x["q"], heads), shared(x["k"], H), x["w"][..., None]
    S, ends, z_of = np.zeros((B, T, heads)), [], np.zeros((B, T, H, k.shape[-1]))
    for s in sequences:
        z = x["z"] if s.row is None else x["z"][s.row : s.row + 1]
        for t in range(s.start, s.stop):
            z = decay[:, t] * z + w[:, t] * k[:, t]
            z_of[:, t] = z
        ends.append(z)
    z_heads = shared(z_of, heads)
    S = SCALE * np.sum(q * z_heads, axis=-1)
    if least:
        D = np.maximum(np.abs(S), shared(x["least"][..., None], heads)[..., 0])
        slope = np.where(np.abs(S) >= D, np.sign(S), 0)
    else:
        D, slope = S + eps, np.ones_like(S)
    out, dnum = x["num"] / D[..., None], x["dout"] / D[..., None]
    c = -slope * np.sum(x["dout"] * x["num"], axis=-1) / D**2 * SCALE
    dq = c[..., None] * z_heads
    dk, dw, dg, dz = np.zeros_like(k), np.zeros((B, T, H)), np.zeros((B, T, H)), np.zeros_like(x["z"])
    for s in sequences:
        own = slice(None) if s.row is None else slice(s.row, s.row + 1)
        R = x["dz"][own]
        for t in reversed(range(s.start, s.stop)):
            R = R + (c[:, t, :, None] * q[:, t]).reshape(B, H, heads // H, -1).sum(axis=2)
            dk[:, t], dw[:, t] = w[:, t] * R, np.sum(k[:, t] * R, axis=-1)
            before = z_of[:, t - 1] if t > s.start else x["z"][own]
            dg[:, t] = decay[:, t, :, 0] * np.sum(R * before, axis=-1)
            R = decay[:, t] * R
        dz[own] = R
    summed = lambda d, n: d.reshape(B, T, n, -1, d.shape[-1]).sum(axis=3)  # noqa: E731
    ends = ends[0] if sequences[0].row is None else np.concatenate(ends)
    dg = summed(dg[..., None], x["g"].shape[2]) if "g" in x else None
    return out, ends, dnum, summed(dq, x["q"].shape[2]), summed(dk, x["k"].shape[2]), dg, dw, dz


def check(found, expected, bound):
    size = max(1.0, np.abs(expected).max(initial=0))
    assert np.abs(found.astype(np.float64) - expected).max(initial=0) <= bound * size


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_sums_quotient_and_gradients(device, case, least, ends):  # noqa: F811
    """ends: whether z after the last token, and the gradient of the first one, are read."""
    x, sequences, dtype = drawn(case)
    eps = 0.0 if least else 40.0  # sums far from 0: a quotient near it has no digits
    mine = {n: device.bring(y) for n, y in x.items()}
    given = Inputs(mine["q"], mine["k"], mine["v"], mine.get("g"))
    plan = Plan(device.xp, np.dtype(np.float32), SCALE, sequences=sequences, returns_state=ends, has_state=ends)
    own = mine["least"] if least else None
    out, z, saved = normaliser.divided(given, plan, mine["num"], mine["z"], mine["w"], own, eps)
    dnum, c = normaliser.numerators_vjp(plan, saved, mine["dout"])
    d = Inputs(*(device.bring(x[n].copy()) if n in x else None for n in ("dq", "dk", "dv", "dg")))
    d, dw, dz = normaliser.add_gradients(given, plan, saved, d, c, mine["dz"])
    want = in_float64(x, sequences, eps, least)
    bound = BOUNDS[dtype]
    found = (out, z, dnum, d.q, d.k, d.g, dw, dz)
    base = (0, 0, 0, x["dq"], x["dk"], x.get("dg"), np.sum(x["v"].astype(float) * x["dv"].astype(float), axis=-1), 0)
    for n, (got, exact, before) in enumerate(zip(found, want, base, strict=True)):
        assert exact is None or got.shape == exact.shape
        if exact is not None and (ends or n not in (1, 7)):
            check(device.see(got), exact + np.asarray(before, np.float64), bound)
    check(device.see(d.v), x["w"][..., None] * x["dv"].astype(np.float64), bound)
    if device.launched is not None:
        entries = [entry for _, entry, *_ in device.launched]
        assert entries[: 3 + ends] == ["adds", *["carry"] * ends, "sums", "quotient"]
        assert {"quotient_vjp", "grads", "weights_vjp"} <= {*entries}


def test_gradients_in_float64_are_central_differences():
    """Of the function that the kernels are compared with."""
    x, sequences, _ = drawn("ragged")
    x = {n: y.astype(np.float64) for n, y in x.items()}
    x["g"] = np.maximum(x["g"], -3)
    names = {"num": 2, "q": 3, "k": 4, "g": 5, "w": 6, "z": 7}
    value = lambda y: np.sum(f(y)[0] * x["dout"]) + np.sum(f(y)[1] * x["dz"])  # noqa: E731
    rng = np.random.default_rng(1)
    for least, eps in ((True, 0.0), (False, 40.0)):
        f = lambda y, least=least, eps=eps: in_float64(y, sequences, eps, least)  # noqa: E731
        grads = f(x)
        for name, at in names.items():
            step = 1e-6 * rng.standard_normal(x[name].shape)
            change = value(x | {name: x[name] + step}) - value(x | {name: x[name] - step})
            np.testing.assert_allclose(change / 2, np.sum(grads[at] * step), rtol=2e-6, atol=1e-11)


def test_a_sequence_has_the_same_bits_in_every_batch(device):  # noqa: F811
    """Alone, beside another row and packed between other sequences; whether states are read or not."""
    x, _, _ = drawn("plain")
    x = {n: y[:1] for n, y in x.items()}

    def run(x, sequences, ends=True):
        mine = {n: device.bring(np.ascontiguousarray(y)) for n, y in x.items()}
        plan = Plan(
            device.xp, np.dtype(np.float32), SCALE, sequences=tuple(sequences), returns_state=ends, has_state=ends
        )
        given = Inputs(mine["q"], mine["k"], mine["v"], mine["g"])
        out, z, saved = normaliser.divided(given, plan, mine["num"], mine["z"], mine["w"], mine["least"], 0.0)
        dnum, c = normaliser.numerators_vjp(plan, saved, mine["dout"])
        d = Inputs(mine["dq"], mine["dk"], mine["dv"], mine["dg"])
        d, dw, dz = normaliser.add_gradients(given, plan, saved, d, c, mine["dz"])
        return [device.see(y) for y in (out, dnum, d.q, d.k, d.v, d.g, dw)], [device.see(y) for y in (z, dz)]

    T = x["q"].shape[1]
    tokens, states = run(x, [Sequence(None, 0, T)])
    twice, two = run({n: np.concatenate([y, y]) for n, y in x.items()}, [Sequence(None, 0, T)])
    packed = {n: np.concatenate([y] * 3, axis=0 if n in ("z", "dz") else 1) for n, y in x.items()}
    packed = {n: y if n in ("z", "dz") else y[:, 100:] for n, y in packed.items()}
    ragged, three = run(packed, sequences_of((0, T - 100, 2 * T - 100, 3 * T - 100)))
    few, _ = run(x, [Sequence(None, 0, T)], ends=False)
    assert [y.tobytes() for y in few] == [y.tobytes() for y in tokens]
    for one, both, own in zip(tokens, twice, ragged, strict=True):
        assert one.tobytes() == both[:1].tobytes() == both[1:].tobytes() == own[:, T - 100 : 2 * T - 100].tobytes()
    for one, both, own in zip(states, two, three, strict=True):
        assert one.tobytes() == both[:1].tobytes() == own[1:2].tobytes()


VARIANTS = {
    "mlstm": (la.mlstm, {}), "mean": (la.linear_attention, {"feature_map": "elu+1", "normalize": True}),
    "rfa": (la.rfa, {"num_features": 32}), "performer": (la.performer, {"num_features": 32}),
    "based": (la.based, {"backend": "cuda"}),
}  # fmt: skip


@pytest.fixture
def stand_in(public, monkeypatch):  # noqa: F811
    """`public`, where without a GPU array calls stand for the passes over the values."""
    if public.launched is not None:
        array_calls = {n: getattr(matrix_state, n) for n in ("backward", "explain", "explain_memories")}
        forward = lambda fn, x, plan, state, wanted: matrix_state.forward(fn, x, plan, state, "chunks")  # noqa: E731
        monkeypatch.setattr(averages, "core", SimpleNamespace(forward=forward, **array_calls))
        monkeypatch.setattr(calls, "unsupported_reason", lambda x, plan: None)
        monkeypatch.setattr(launch, "capability", lambda: 90)
        real = array_api_compat.array_namespace
        monkeypatch.setattr(array_api_compat, "array_namespace",
                            lambda *x: public.xp if any(isinstance(y, Stub) for y in x) else real(*x))  # fmt: skip
    return public


@pytest.mark.parametrize("dtype", ["float32", BFLOAT16], ids=str)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(stand_in, name, ragged, dtype):
    """Results, states and gradients."""
    (fn, options), T, device = VARIANTS[name], 150, stand_in  # noqa: F811
    cu = {"cu_seqlens": [0, 20, 20, 150]} if ragged else {}
    rng = np.random.default_rng(0)
    how = {"B": (1 if ragged else 2,), "T": T, "H": 2, "Hk": 2, "Hq": 2, "K": 8, "V": 8, "optional": name == "rfa"}
    kind = lambda n: dtype if n in "qkv" else np.float32  # noqa: E731
    x = {n: y.astype(kind(n)) for n, y in la.testing.sample(fn, rng, **how).items()}
    N = 3 if ragged else 2
    own = {n: y for n, y in options.items() if n != "backend"}
    begin = {n: np.repeat(y[:1, :5], N, axis=0).astype(np.float64) for n, y in x.items()}
    _, before = fn(**begin, **own, return_state=True)
    state = type(before)(*(y.astype(np.float32) for y in before))

    def pulled(bring, see, options):
        there = type(state)(*map(bring, state))
        given = {n: bring(y) for n, y in x.items()} | options | cu
        result, pull = la.vjp(fn, **given, state=there, return_state=True)
        dstate = type(state)(*(bring(y) for y in dparts))
        grads = [y for d in pull(bring(dout), dstate) for y in parts(d) if y is not None]
        return [see(y) for y in (*parts(result), *grads)]

    dout = rng.standard_normal(x["v"].shape).astype(dtype)
    dparts = [rng.standard_normal(y.shape).astype(np.float32) for y in state]
    expected = pulled(lambda y: y.astype(np.float64), np.asarray, own)
    found = pulled(device.bring, device.see, options)
    for got, exact in zip(found, expected, strict=True):
        check(np.asarray(got), exact, 1e-3 if dtype == "float32" else 4e-2)
    if device.launched is not None:
        assert {"sums", "quotient", "quotient_vjp", "grads"} <= {entry for _, entry, *_ in device.launched}


def test_words_of_explain(stand_in):
    x = {n: stand_in.bring(np.ones((1, 40, 2, 8), np.float32)) for n in "qkv"}
    how = {"feature_map": "elu+1", "normalize": True}
    assert (
        "the sum of weights and the quotient by kernels of their own"
        in la.explain(la.linear_attention, **x, **how).reason
    )
