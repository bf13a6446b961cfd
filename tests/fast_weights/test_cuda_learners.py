"""Learners on CuPy arrays, emulated here or on a GPU, against the definition in float64."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.fast_weights.array import chunks
from linattn_np.fast_weights.cuda import between, momentum
from tests.cuda.emulation import device, emulated, public  # noqa: F401

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
MILD = ((1.875, -1.25, 0.375),)  # the slope of published iterations is in the hundreds
LEARNERS = {
    "ttt_mlp": ({"mini_batch": 16}, {"mini_batch": 5, "read": "before"}),
    "titans": ({"mini_batch": 16}, {"mini_batch": 4, "read": "before"}),
    "titans_linear": ({"mini_batch": 16}, {"mini_batch": 3}, {"mini_batch": 1}, {"mini_batch": 5, "read": "before"}),
    "lact": ({"mini_batch": 8, "muon": MILD}, {"mini_batch": 5, "muon": MILD, "stacked": True}, {"muon": None}),
    "atlas": ({"mini_batch": 8, "muon": None}, {"mini_batch": 4, "window": 3, "muon": MILD}),
}
CASES = [(name, options) for name, every in LEARNERS.items() for options in every]
each = pytest.mark.parametrize(("name", "options"), CASES, ids=str)


def drawn(name, T=37, H=2, B=(2,), K=6, V=5, seed=0, dtype=FLOAT32, without=()):
    """Arrays by name, with the rounding of `dtype`."""
    rng = np.random.default_rng(seed)
    arrays = la.testing.sample(getattr(la, name), rng, B=B, T=T, H=H, K=K, V=V)
    return {n: x.astype(dtype) for n, x in arrays.items() if n not in without}


def called(name, arrays, bring=np.asarray, see=np.asarray, state=None, **options):
    """Out, parts of the final state, gradients."""
    given = {n: bring(x) for n, x in arrays.items()}
    if state is not None:
        given["state"] = type(state)(*map(bring, state))
    (out, end), pull = la.vjp(getattr(la, name), **given, return_state=True, **options)
    rng = np.random.default_rng(1)
    dout = rng.standard_normal(out.shape).astype(FLOAT32)
    dend = [rng.standard_normal(S.shape).astype(FLOAT32) for S in end[:-1]]
    to = arrays["v"].dtype
    found = pull(bring(dout.astype(to)), type(end)(*(bring(d.astype(to)) for d in dend), end[-1]))
    grads = {f"d{n}": getattr(found, n) for n in arrays}
    grads |= {} if state is None else {f"dstate.{n}": getattr(found.state, n) for n in end._fields[:-1]}
    ends = {f"state.{n}": getattr(end, n) for n in end._fields[:-1]}
    return {n: see(y) for n, y in ({"out": out} | ends | grads).items()}


def compare(device, name, arrays, state=None, few=2.0**-14, **options):  # noqa: F811
    """Results and gradients against the definition."""
    found = called(name, arrays, device.bring, device.see, state, **options)
    wide = {n: x.astype(FLOAT64) for n, x in arrays.items()}
    start = None if state is None else type(state)(*(S.astype(FLOAT64) for S in state[:-1]), state[-1])
    exact = called(name, wide, state=start, backend="reference", **options)
    assert found.keys() == exact.keys()
    for n, e in exact.items():
        error = np.linalg.norm(found[n].astype(FLOAT64) - e)
        assert error <= few * (np.linalg.norm(e) + 1e-2), (n, error, np.linalg.norm(e))
    return found


@each
def test_it_is_the_definition(public, name, options):  # noqa: F811
    compare(public, name, drawn(name), **options)


@each
def test_doubles(public, name, options):  # noqa: F811
    compare(public, name, drawn(name, T=19, B=(1,), dtype=FLOAT64), few=1e-9, **options)


@each
def test_a_state_goes_on_anywhere(public, name, options):  # noqa: F811
    """After 7 tokens, in a mini-batch or between two."""
    first, arrays = drawn(name, T=7, B=(1,), seed=3), drawn(name, T=23, B=(1,))
    _, state = getattr(la, name)(**first | {n: x for n, x in arrays.items() if n[0] in "WABbs"
                                            and x.ndim < 4 and n not in ("beta", "share")}, **options,
                                 return_state=True)  # fmt: skip
    state = type(state)(*(np.asarray(S) for S in state))
    compare(public, name, arrays, state, **options)


@pytest.mark.parametrize("T", [1, 3, 16, 64, 65, 130])
@pytest.mark.parametrize("mini_batch", [1, 3, 16, 64])
def test_the_walk_of_a_linear_memory(public, T, mini_batch):  # noqa: F811
    """Tiles are whole mini-batches, a last one that is not whole is its own."""
    compare(public, "titans_linear", drawn("titans_linear", T=T, B=(1,), H=1), mini_batch=mini_batch)
    if public.launched is not None:
        walk = momentum.WALK if mini_batch == 1 else momentum.SOURCE
        assert {entry for file, entry, *_ in public.launched if file == walk} == {"forward", "backward"}


@pytest.mark.parametrize("name", ["ttt_mlp", "titans", "titans_linear", "lact"])
def test_sequences_of_a_ragged_batch(public, name):  # noqa: F811
    _, options = next(case for case in CASES if case[0] == name)
    compare(public, name, drawn(name, T=30, B=()), cu_seqlens=np.array([0, 0, 7, 29, 30]), **options)


@pytest.mark.parametrize("without", [("gain",), ()])
def test_what_is_not_given(public, without):  # noqa: F811
    compare(public, "ttt_mlp", drawn("ttt_mlp", T=20, without=without), mini_batch=16)


@pytest.mark.parametrize("name", ["ttt_mlp", "lact", "atlas"])
def test_states_of_few_tiles_give_the_same_bits(public, name, monkeypatch):  # noqa: F811
    """The others are computed again."""
    options = {"mini_batch": 3} | ({} if name == "ttt_mlp" else {"muon": MILD})
    arrays = drawn(name, T=31, B=(1,))
    whole = called(name, arrays, public.bring, public.see, **options)
    monkeypatch.setattr(chunks, "MAX_STATES", 0)
    for n, y in called(name, arrays, public.bring, public.see, **options).items():
        np.testing.assert_array_equal(y, whole[n], err_msg=n)


@each
def test_the_same_bits_on_each_run(public, name, options):  # noqa: F811
    arrays = drawn(name, T=20)
    first = called(name, arrays, public.bring, public.see, **options)
    for n, y in called(name, arrays, public.bring, public.see, **options).items():
        np.testing.assert_array_equal(y, first[n], err_msg=n)


def test_kernels_compute_what_lies_between_products(public):  # noqa: F811
    """All formulas of the table are launched by learners."""
    for name, options in (*CASES, ("ttt_mlp", {"mini_batch": 4})):
        without = ("gain",) if (name, options) == ("ttt_mlp", {"mini_batch": 4}) else ()
        called(name, drawn(name, T=9, B=(1,), without=without), public.bring, public.see, **options)
    if public.launched is not None:
        kinds = {dict(made)["LA_KIND"] for file, _, made, *_ in public.launched if file == between.SOURCE}
        assert kinds == set(between.KINDS.values())


@pytest.mark.gpu
@each
def test_a_call_may_be_captured_in_a_graph(name, options):
    cp = pytest.importorskip("cupy")
    from bench.cuda import timing

    fn, arrays = getattr(la, name), {n: cp.asarray(x) for n, x in drawn(name).items()}

    def both():
        out, pull = la.vjp(fn, **arrays, **options)
        return out, pull(out)

    assert timing.graph_ms(cp, [both], repeats=1) > 0
