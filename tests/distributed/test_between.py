"""Ranks whose kernels ask for the state that enters them: the host code of every family on stubs; numbers on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import binding
from linattn_np.distributed import between, in_threads, local, run, tokens
from linattn_np.distributed.entry import Entry
from linattn_np.distributed.parts import Ranks
from linattn_np.runtime.cuda import launch
from linattn_np.testing import relative_error, to_numpy
from tests.matrix_state.cuda.step_twin import CUPY, stub
from tests.matrix_state.cuda.test_host_code import BFLOAT16, arrays_of, launched, launches, public  # noqa: F401

FAMILIES = [
    (90, BFLOAT16, la.simple_gla), (90, BFLOAT16, la.linear_attention), (80, np.float16, la.simple_gla),
    (90, BFLOAT16, la.gated_delta_rule), (90, BFLOAT16, la.gla), (90, BFLOAT16, la.rwkv6), (90, BFLOAT16, la.kda),
    (80, np.float32, la.simple_gla), (80, np.float32, la.linear_attention),
]  # fmt: skip
OTHERS = [
    (80, np.float32, la.gated_delta_rule), (80, np.float32, la.kda),
    (90, BFLOAT16, la.rwkv7), (90, BFLOAT16, la.mlstm), (90, BFLOAT16, la.mesa_net),
]  # fmt: skip


def word(x):
    """A parameter in the name of a test: a function by its name."""
    return getattr(x, "__name__", str(x))


by_family = pytest.mark.parametrize(("capability", "dtype", "fn"), FAMILIES, ids=word)


class Middle:
    """The second of three ranks that have the same."""

    rank, size = 1, 3

    def __init__(self):
        self.sent, self.waited = [], 0

    def all_gather(self, x):
        self.sent.append(x.size)
        return stub(np.stack([x] * self.size))


class Late(Middle):
    """The same; `begin` does not wait."""

    def begin(self, x):
        return self.all_gather(x), self.wait

    def wait(self):
        self.waited += 1


@pytest.fixture
def on_gpu(launches, monkeypatch):  # noqa: F811
    monkeypatch.setattr(between, "_made", set())
    monkeypatch.setattr(between, "is_cupy", lambda xp: True)
    monkeypatch.setattr(tokens, "array_namespace", lambda x: CUPY)
    monkeypatch.setattr(local, "enter", binding.enter)
    return launches


@by_family
@pytest.mark.parametrize("T", [600, 3000], ids=["one segment", "segments"])
def test_one_pass_with_one_exchange_each_way(on_gpu, monkeypatch, capability, dtype, fn, T):
    """No summary is computed apart: every entry has the sums that its kernels hand out."""
    monkeypatch.setattr(launch, "capability", lambda: capability)
    spans = []
    init = Entry.__init__
    monkeypatch.setattr(Entry, "__init__", lambda self, local, spans_=None, **given: (
        spans.append(given.get("spans", spans_)), init(self, local, spans[-1]))[0])  # fmt: skip
    arrays, comm = arrays_of(fn, T, dtype, 0), Late()
    dout = stub(np.ones(arrays["v"].shape, dtype))
    la.vjp(run, fn, **arrays, comm=comm)[1](dout)
    assert (len(comm.sent), comm.waited) == (2, 0)  # at once: the first call loads kernels
    spans.clear()
    comm = Late()
    out, pull = la.vjp(run, fn, **arrays, comm=comm)
    assert (len(comm.sent), comm.waited) == (1, 1)
    grads = pull(dout)._asdict()
    assert (len(comm.sent), comm.waited) == (2, 2)
    assert len(spans) == 1
    assert spans[0] is not None
    assert (out.shape, out.dtype) == (arrays["v"].shape, dtype)
    assert [(grads[n].shape, grads[n].dtype) for n in arrays] == [(x.shape, x.dtype) for x in arrays.values()]
    state = stub(np.zeros((2, 4, 64, 64), np.float32))
    for waited in (0, 4):  # two exchanges of states more
        comm = Late()
        (_, end), pull = la.vjp(run, fn, **arrays, comm=comm, state=state, return_state=True)
        grads = pull(None, stub(np.ones(end.shape, np.float32)))
        assert end.shape == grads.state.shape == state.shape
        assert (len(comm.sent), comm.waited) == (4, waited)


@pytest.mark.parametrize(("capability", "dtype", "fn"), OTHERS, ids=word)
def test_other_kernels_do_not_ask_for_states(on_gpu, monkeypatch, capability, dtype, fn):
    monkeypatch.setattr(launch, "capability", lambda: capability)
    call = local.Local(fn, Ranks(Middle()), arrays_of(fn, 128, dtype, 0))
    assert between.prepared(call, gradients=True) is None


def test_segments_of_fixed_length_and_one_rank_ask_for_none(on_gpu):
    """Bits with segments do not depend on the number of ranks, nor on how kernels cut the tokens of a rank."""
    arrays = arrays_of(la.simple_gla, 128, BFLOAT16, 0)
    for ranks in (Ranks(Middle(), segment=64), Ranks(Middle(), segment=128), Ranks(la.distributed.Threads.of(1)[0])):
        assert between.prepared(local.Local(la.simple_gla, ranks, arrays), gradients=True) is None
    assert between.prepared(local.Local(la.simple_gla, Ranks(Middle()), arrays), gradients=True) is not None


@pytest.mark.parametrize("given", [True, False], ids=["a gradient of the last state", "none"])
@pytest.mark.parametrize("fn", [la.simple_gla, la.linear_attention, la.gla, la.gated_delta_rule, la.kda], ids=word)
def test_gradients_of_outputs_and_of_the_last_state_reach_every_rank(fn, given):
    """Kernels hand in what their outputs' gradient makes of the gradient of the state before their tokens."""
    rng, T = np.random.default_rng(6), 12
    arrays = la.testing.sample(fn, rng, B=(2,), T=T, optional=False)
    dout = rng.standard_normal(arrays["v"].shape)
    state = fn(**arrays, return_state=True).state
    dstate = rng.standard_normal(state.shape) if given else None

    def work(comm):
        own = tokens_of(arrays, 4 * comm.rank, 4 * comm.rank + 4)
        ranks = between.Between(local.Local(fn, Ranks(comm), own | {"state": state}))
        S = ranks.state(*la.summary(fn, **own))
        ranks.end = {0: dstate} if given else {}
        _, pull = la.vjp(fn, **own, state=S, return_state=True)
        return S, ranks.gradient(pull(dout[:, 4 * comm.rank : 4 * comm.rank + 4], None).state)

    for n, (S, d) in enumerate(in_threads(3, work, timeout=60.0)):
        before, after = tokens_of(arrays, 0, 4 * n), tokens_of(arrays, 4 * n + 4, T)
        assert relative_error(S, fn(**before, state=state, return_state=True).state) < 1e-12
        if n == 2:
            assert d is dstate
        else:
            _, pull = la.vjp(fn, **after, state=S, return_state=True)
            assert relative_error(d, pull(dout[:, 4 * n + 4 :], dstate).state) < 1e-12


LENGTHS = (700, 1300, 2048)  # of a rank; the first two end inside a chunk


def tokens_of(arrays, start, stop):
    return {n: x[:, start:stop] if x.ndim > 2 else x for n, x in arrays.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [2, 70], ids=["segments", "one segment"])
@by_family
def test_ranks_on_a_gpu_are_as_exact_as_the_plain_call(capability, dtype, fn, heads):
    """Three ranks that are threads; gates are small, so that earlier ranks matter.

    Both have the bound of a call on one rank, relative to float64. Kernels round the state before a chunk, P and the
    result to the dtype, each by half a unit in the last place at most (2^-9 of bfloat16). A chunk begins elsewhere on
    a rank, so these errors are independent of those of the plain call: a difference of the two has both. The gradient
    of the last state is large and reaches the first rank, so that no bound hides it.
    """
    cp = pytest.importorskip("cupy")
    if capability == 90 and launch.capability() != 90:
        pytest.skip("needs compute capability 90")
    rng, T = np.random.default_rng(1), sum(LENGTHS)
    drawn = la.testing.sample(fn, rng, B=(1,), T=T, H=heads, K=64, V=128, optional=False)
    drawn |= {n: small * drawn[n] for n, small in (("g", 0.001), ("beta", 0.01)) if n in drawn}
    wide = ("g", "beta", "u")  # of float32
    arrays = {n: cp.asarray(x.astype(np.float32 if n in wide else dtype)) for n, x in drawn.items()}
    state = cp.asarray(rng.standard_normal((1, heads, 64, 128)), np.float32)
    dout = cp.asarray(rng.standard_normal((1, T, heads, 128)).astype(dtype))
    dstate = cp.asarray(30 * rng.standard_normal(state.shape), np.float32)

    def whole(given, S, *cotangents):
        (out, end), pull = la.vjp(fn, **given, state=S, return_state=True)
        return {"out": out, "end": end} | pull(*cotangents)._asdict()

    plain = whole(arrays, state, dout, dstate)
    wanted = whole({n: to_numpy(x) for n, x in arrays.items()}, *map(to_numpy, (state, dout, dstate)))
    bounds = [0, *np.cumsum(LENGTHS).tolist()]

    def work(comm):
        own = bounds[comm.rank], bounds[comm.rank + 1]
        mine = tokens_of(arrays, *own)
        (y, last), back = la.vjp(run, fn, **mine, comm=comm, state=state, return_state=True)
        grads = back(dout[:, slice(*own)], dstate)._asdict()
        alone = run(fn, **mine, comm=comm, state=state)
        return {"out": y, "alone": alone, "end": last} | grads

    each = in_threads(3, work, timeout=60.0)
    each_rank = {n: [rank[n] for rank in each] for n, x in wanted.items() if x is not None}
    errors = {f"plain {n}": relative_error(plain[n], wanted[n]) for n in each_rank}
    for name, found in each_rank.items():
        one = name in ("end", "state")
        joined = found if one else [sum(found) if name == "u" else cp.concatenate(found, axis=1)]
        errors[name] = max(relative_error(y, wanted[name]) for y in joined)
    errors["alone"] = relative_error(cp.concatenate([rank["alone"] for rank in each], axis=1), wanted["out"])
    assert max(errors.values()) < (1e-5 if dtype == np.float32 else 2e-2), errors
