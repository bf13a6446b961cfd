"""CUDA kernels of erase FREE: cases that other vector decays do not have (see vector/test_kernels.py)."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state import policy
from tests.matrix_state.cuda.vector.test_kernels import GATES, OUT, draw, gates, run

from ..device_arrays import error, same

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


def test_no_decay(cp):
    """iplr, with states and ragged."""
    arrays, state = draw(la.rwkv7, B=1, T=200, N=3)
    del arrays["g"]
    options = {"cu_seqlens": [0, 70, 70, 200]}
    out, end = run(cp, la.iplr, arrays, state, **options)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected, last = la.iplr(**wide, state=state.astype(np.float64), return_state=True, **options)
    assert error(out, expected) < OUT
    assert error(end, last) < OUT


@pytest.mark.parametrize("rate", [0.5, 1.0, 1.9])
@pytest.mark.parametrize("kind", ["zero", "mild"])
def test_one_vector_at_every_token(cp, kind, rate):
    """a reads and b erases the same direction at every token: the triangular system has no small entry."""
    arrays, state = draw(la.rwkv7, B=1, T=300, heads=(2, 2, 2), kind=kind)
    arrays["a"][:] = arrays["a"][:, :1]
    arrays["b"] = (-rate * arrays["a"].astype(np.float32)).astype(arrays["a"].dtype)
    arrays["k"][:] = arrays["a"]
    out, end = run(cp, la.rwkv7, arrays, state)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected, last = la.rwkv7(**wide, state=state.astype(np.float64), return_state=True)
    assert error(out, expected) < 2.5e-2
    assert error(end, last) < 2.5e-2


@pytest.mark.parametrize(("kind", "K", "bounds"), [
    ("rwkv7", 128, {"out": 2.85e-3, "q": 1.8e-3, "k": 1.8e-3, "v": 2.85e-3, "g": 1.9e-3, "a": 3.9e-3, "b": 3.8e-3}),
    ("rwkv7", 64, {"out": 2.9e-3, "q": 1.85e-3, "k": 1.85e-3, "v": 2.9e-3, "g": 1.95e-3, "a": 4e-3, "b": 3.85e-3}),
    ("five", 128, {"out": 1.8e-3, "q": 1.75e-3, "k": 1.75e-3, "v": 1.8e-3, "g": 1.9e-3, "a": 3.1e-3, "b": 3.1e-3}),
])  # fmt: skip
def test_roundings(cp, kind, K, bounds):
    """Of log decays in (-0.6, 0) and of -5. A result's own rounding is 1.66e-3, pairs of one term give 2.4e-3."""
    arrays, _ = draw(la.rwkv7, B=1, T=513, heads=(4, 4, 4), K=K, V=K, kind="five", gate="bfloat16")
    rng = np.random.default_rng(1)
    if kind == "rwkv7":
        arrays["g"] = (-0.6 * rng.random(arrays["g"].shape)).astype(arrays["g"].dtype)
    dout = rng.standard_normal(arrays["v"].shape).astype(arrays["v"].dtype)
    there, wide = ({n: f(x) for n, x in arrays.items()} for f in (cp.asarray, lambda x: x.astype(np.float64)))
    out, pull = la.vjp(la.rwkv7, **there, backend="cuda")
    expected, right = la.vjp(la.rwkv7, **wide)
    assert error(out, expected) < bounds["out"]
    found = pull(cp.asarray(dout))._asdict()
    for name, want in right(dout.astype(np.float64))._asdict().items():
        if want is not None:
            assert error(found[name], want) < bounds[name], name


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
def test_channels_at_the_edge_of_quotients(cp, gate):
    """Channels that lose 61 or 63 nats in a chunk: quotients bear 62."""
    arrays, state = draw(la.rwkv7, B=1, T=300, heads=(2, 2, 2), gate=gate)
    rng = np.random.default_rng(0)
    g = rng.choice([-61 / 64, -63 / 64, 0.0], arrays["g"].shape[-2:])
    arrays["g"] = np.broadcast_to(g, arrays["g"].shape).astype(arrays["g"].dtype)
    out, end = run(cp, la.rwkv7, arrays, state)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected, last = la.rwkv7(**wide, state=state.astype(np.float64), return_state=True)
    assert error(out, expected) < OUT
    assert error(end, last) < OUT


def test_states_at_positions(cp):
    arrays, state = draw(la.dplr, T=300, kind="mild")
    out, end = run(cp, la.dplr, arrays, state)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    found = la.dplr(**there, state=cp.asarray(state), return_states_at=(64, 128, 300))
    assert same(found[0], out)
    _, middle = run(cp, la.dplr, {n: x[:, :128] for n, x in arrays.items()}, state)
    assert same(found.states[:, 1], middle)
    assert same(found.states[:, 2], end)


def test_a_chunk_that_is_far_changes_no_bit_before_it(cp):
    """Rows of a chunk that the exact build recomputes have the bits of the other build up to the first far row."""
    mild, state = draw(la.rwkv7, B=1, T=128, kind="mild")
    out, _ = run(cp, la.rwkv7, mild, state)
    for at in (70, 80, 100):
        there = {n: x.copy() for n, x in mild.items()}
        there["g"][:, at:] = gates(np.random.default_rng(1), there["g"][:, at:].shape, "mixed")
        found, _ = run(cp, la.rwkv7, there, state)
        assert same(found[:, :at], out[:, :at])


def gradients(cp, fn=la.rwkv7, options=None, given_end=True, **how):
    """(gradients by kernels, in float64) by name."""
    arrays, state = draw(fn, **how)
    options, rng = options or {}, np.random.default_rng(1)
    if fn is la.iplr:
        arrays.pop("g", None)
    heads = max(arrays["q"].shape[2], arrays["v"].shape[2])
    dout = rng.standard_normal((*arrays["v"].shape[:2], heads, arrays["v"].shape[3])).astype(arrays["v"].dtype)
    dstate = rng.standard_normal(state.shape).astype(np.float32) if given_end else None
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    _, pull = la.vjp(fn, **there, state=cp.asarray(state), return_state=True, backend="cuda", chunk_size=64, **options)
    found = pull(cp.asarray(dout), None if dstate is None else cp.asarray(dstate))
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    _, pull = la.vjp(fn, **wide, state=state.astype(np.float64), return_state=True, **options)
    right = pull(dout.astype(np.float64), None if dstate is None else dstate.astype(np.float64))
    return found._asdict(), {n: x for n, x in right._asdict().items() if x is not None}


def check(found, right):
    for name, want in right.items():
        assert error(found[name], want) < OUT, name
        assert np.isfinite(np.asarray(found[name].get(), np.float32)).all(), name


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", GATES)
def test_gradients(cp, kind, gate):
    check(*gradients(cp, kind=kind, gate=gate, T=200))


def ids(how):
    """Names without addresses."""
    return " ".join(f"{n}={getattr(x, '__name__', x)}" for n, x in how.items())


@pytest.mark.parametrize(
    "how",
    [
        {"T": 1},
        {"T": 17},
        {"T": 65, "given_end": False},
        {"K": 64, "V": 64},
        {"K": 128, "V": 64},
        {"K": 64, "V": 128},
        {"K": 40, "V": 120, "gate": "bfloat16"},
        {"heads": (4, 2, 2)},
        {"heads": (1, 1, 4)},
        {"heads": (2, 2, 4)},
        {"options": {"cu_seqlens": [0, 5, 5, 70, 97, 300, 301]}, "B": 1, "T": 301, "N": 6},
        {"options": {"cu_seqlens": [0, 64, 130]}, "B": 1, "T": 130, "N": 2, "K": 64, "V": 40},
        {"fn": la.dplr, "options": {"scale": 0.3}},
        {"fn": la.iplr},
        {"T": 1, "kind": "twenty"},
        {"T": 17, "kind": "twenty", "given_end": False},
        {"K": 64, "V": 64, "kind": "mixed"},
        {"K": 128, "V": 64, "kind": "edge"},
        {"K": 40, "V": 120, "kind": "mixed", "heads": (2, 2, 4)},
        {"options": {"cu_seqlens": [0, 5, 5, 70, 97, 300, 301]}, "B": 1, "T": 301, "N": 6, "kind": "mixed"},
    ],
    ids=ids,
)
def test_gradients_of(cp, how):
    """Of few tokens, of other widths, of shared heads, of packed sequences, without decays, without quotients."""
    check(*gradients(cp, kind=how.pop("kind", "mild"), **how))


def test_gradients_from_nothing_kept(cp, monkeypatch):
    """Backward recomputes the forward if its residuals are too large: the same bits."""
    kept, _ = gradients(cp, T=200)
    monkeypatch.setattr(policy, "saves_factors", lambda size: False)
    found, _ = gradients(cp, T=200)
    assert all(same(found[n], x) for n, x in kept.items() if x is not None)


@pytest.mark.parametrize("kind", ["mild", "mixed"])
def test_gradients_alone_batched_and_packed(cp, kind):
    """The same bits."""
    arrays, state = draw(la.rwkv7, B=2, T=200, kind=kind)
    dout = np.random.default_rng(1).standard_normal(arrays["v"].shape).astype(arrays["v"].dtype)

    def pulled(pick, **options):
        there = {n: cp.asarray(pick(x)) for n, x in arrays.items()}
        first = cp.asarray(state if options else pick(state))
        _, pull = la.vjp(la.rwkv7, **there, state=first, backend="cuda", chunk_size=64, **options)
        return {n: x for n, x in pull(cp.asarray(pick(dout)))._asdict().items() if x is not None}

    whole = pulled(lambda x: x)
    packed = pulled(lambda x: x.reshape(1, -1, *x.shape[2:]), cu_seqlens=[0, 200, 400])
    for n, x in whole.items():
        assert same(packed[n].reshape(x.shape), x), n
        for b in range(2):
            alone = pulled(lambda x, b=b: x[b : b + 1])
            assert same(alone[n], x[b : b + 1]), n


def of_gdn2(T=200, heads=(2, 2, 2), K=128, V=128, kind="mild", gate="float32", N=1):
    """(arrays of gdn2 by name, initial state), rounded."""
    arrays, state = draw(la.rwkv7, B=1, T=T, heads=heads, K=K, V=V, kind=kind, gate=gate, N=N)
    rng, (H, narrow) = np.random.default_rng(2), (heads[2], arrays["v"].dtype)
    arrays = {n: arrays[n] for n in "qkvg"} | {
        "b": rng.uniform(0, 1, (1, T, H, K)).astype(narrow),
        "w": rng.uniform(0, 1, (1, T, H, V)).astype(narrow),
    }
    return arrays, state


def compare_gdn2(cp, options=None, **how):
    """Output, final state and gradients."""
    (arrays, state), options = of_gdn2(**how), options or {}
    rng = np.random.default_rng(1)
    heads = max(arrays["q"].shape[2], arrays["v"].shape[2])
    dout = rng.standard_normal((*arrays["v"].shape[:2], heads, arrays["v"].shape[3])).astype(arrays["v"].dtype)
    dstate = rng.standard_normal(state.shape).astype(np.float32)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    result, pull = la.vjp(la.gdn2, **there, state=cp.asarray(state), return_state=True, backend="cuda", chunk_size=64,
                          **options)  # fmt: skip
    found = pull(cp.asarray(dout), cp.asarray(dstate))._asdict()
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected, pull = la.vjp(la.gdn2, **wide, state=state.astype(np.float64), return_state=True, **options)
    right = pull(dout.astype(np.float64), dstate.astype(np.float64))._asdict()
    for name, x, want in zip(("out", "state"), result, expected, strict=True):
        assert error(x, want) < OUT, name
    for name, want in right.items():
        if want is not None:
            assert error(found[name], want) < 2 * OUT, name


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", GATES)
def test_erase_vectors_of_its_own(cp, kind, gate):
    compare_gdn2(cp, kind=kind, gate=gate)


@pytest.mark.parametrize(
    "how",
    [
        {"T": 17},
        {"T": 65, "K": 64, "V": 40},
        {"heads": (4, 2, 2)},
        {"heads": (1, 1, 4)},
        {"options": {"cu_seqlens": [0, 5, 5, 70, 97, 300, 301]}, "T": 301, "N": 6},
        {"options": {"qk_l2norm": True}, "gate": "bfloat16"},
    ],
    ids=ids,
)
def test_erase_vectors_of(cp, how):
    compare_gdn2(cp, **how)
