"""Selective scans between ranks that have the tokens before and after: one pass, emulated here or on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import binding, neighbours
from linattn_np.distributed import between, local, run, tokens
from linattn_np.elementwise.cuda import selective, selective_plan
from tests.cuda.emulation import device, emulated, public  # noqa: F401

FUNCTIONS = {"selective_scan": (la.selective_scan, "x", {"dt_softplus": True}),
             "diagonal_longhorn": (la.diagonal_longhorn, "v", {})}  # fmt: skip


@pytest.mark.parametrize("segment", [512, 16], ids=["whole", "segments"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rank_sums_up_its_tokens_and_asks_for_its_state(public, monkeypatch, name, segment):  # noqa: F811
    """Its summary is that of `la.summary`; outputs and gradients are those of a call with the state it gets."""
    monkeypatch.setattr(selective_plan, "SEGMENT", segment)
    fn, value, options = FUNCTIONS[name]
    rng, T, D, N = np.random.default_rng(0), 70, 6, 4
    arrays = {n: x.astype(np.float32) for n, x in la.testing.sample(fn, rng, B=(2,), T=T, V=D, K=N).items()}
    state, dstate = rng.standard_normal((2, 2, D, N)).astype(np.float32)
    dout = rng.standard_normal(arrays[value].shape).astype(np.float32)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    span = la.summary(fn, **wide, **options)
    (out, end), pull = la.vjp(fn, **wide, state=state.astype(float), return_state=True, **options)
    alone, exact = pull(dout.astype(float), None).state, pull(dout.astype(float), dstate.astype(float))
    asked = dict[str, np.ndarray]()

    def entering(transfer, offset):
        asked.update(transfer=public.see(transfer), offset=public.see(offset))
        return public.bring(state)

    def leaving(d):
        asked.update(gradient=public.see(d))
        return public.bring(dstate)

    given = (
        {n: public.bring(x) for n, x in arrays.items()} | options | {"return_state": True, "state": public.bring(state)}
    )
    call, x = neighbours.prepared(fn.spec, given, gradients=True)
    ranks = SimpleNamespace(state=entering, gradient=leaving)
    (found, last), pullback = neighbours.run_vjp(call, x, ranks, given)
    grads = pullback(public.bring(dout))
    pairs = [(found, out), (last, end), (asked["transfer"], span.transfer.factors), (asked["offset"], span.offset),
             (asked["gradient"], alone)]  # fmt: skip
    pairs += [(getattr(grads, n), getattr(exact, n)) for n in (*arrays, "state")]
    for y, e in pairs:
        assert np.linalg.norm(public.see(y) - e) <= 512 * 2.0**-23 * np.linalg.norm(e)
    if public.launched is not None:
        entries = [entry for file, entry, *_ in public.launched if "selective" in file]
        cut = ["chain"] * (segment == 16)
        assert entries == ["carry", "chain", *cut, "selective", "carry_back", "chain", *cut, "selective_vjp"]
        assert {file for file, *_ in public.launched if "selective" in file} == {selective.FORWARD, selective.BACKWARD}


def test_a_first_rank_gets_no_state_and_a_last_one_no_gradient(public):  # noqa: F811
    rng = np.random.default_rng(0)
    arrays = la.testing.sample(la.selective_scan, rng, B=(1,), T=20, V=3, K=4)
    given = {n: public.bring(x.astype(np.float32)) for n, x in arrays.items()} | {"return_state": True}
    call, x = neighbours.prepared(la.selective_scan.spec, given, gradients=True)
    none = SimpleNamespace(state=lambda *span: None, gradient=lambda d: None)
    (out, end), pull = neighbours.run_vjp(call, x, none, given)
    expected, own = la.vjp(la.selective_scan, **given)
    assert np.array_equal(public.see(out), public.see(expected.out))
    assert np.array_equal(public.see(end), public.see(expected.state))
    for y, e in zip(pull(out), own(out, None), strict=True):
        assert (y is None) == (e is None)
        assert y is None or np.array_equal(public.see(y), public.see(e))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_second_of_three_ranks_with_the_same_tokens(public, monkeypatch, name):  # noqa: F811
    """Outputs and gradients are those of the middle third of all tokens; every token is read by one pass each way."""
    if public.launched is not None:
        monkeypatch.setattr(between, "is_cupy", lambda xp: True)
        monkeypatch.setattr(tokens, "array_namespace", lambda x: public.xp)
        monkeypatch.setattr(local, "enter", binding.enter)
    fn, value, options = FUNCTIONS[name]
    rng, T = np.random.default_rng(0), 20
    arrays = {n: x.astype(np.float32) for n, x in la.testing.sample(fn, rng, B=(2,), T=T, V=6, K=4).items()}
    dout = rng.standard_normal(arrays[value].shape).astype(np.float32)
    of_tokens = [n for n, x in arrays.items() if x.shape[:2] == (2, T)]
    wide = {n: np.concatenate([x] * 3, axis=1) if n in of_tokens else x for n, x in arrays.items()}
    wide = {n: x.astype(np.float64) for n, x in wide.items()}
    out, pull = la.vjp(fn, **wide, **options)
    exact = pull(np.concatenate([dout] * 3, axis=1).astype(float))
    comm = SimpleNamespace(rank=1, size=3, all_gather=lambda x: public.bring(np.stack([public.see(x)] * 3)))
    found, pullback = la.vjp(run, fn, **{n: public.bring(x) for n, x in arrays.items()}, **options, comm=comm)
    grads = pullback(public.bring(dout))
    for y, e in [(found, out), *((getattr(grads, n), getattr(exact, n)) for n in of_tokens)]:
        e = e[:, T : 2 * T]
        assert np.linalg.norm(public.see(y) - e) <= 512 * 2.0**-23 * np.linalg.norm(e)
    if public.launched is not None:
        entries = [entry for file, entry, *_ in public.launched if "selective" in file]
        assert entries == ["carry", "chain", "selective", "carry_back", "chain", "selective_vjp"]
