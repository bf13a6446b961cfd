"""dask arrays: one task a block of batch rows and heads, nothing computed by the call."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("dask.array")

import dask
import dask.array as da

import linattn_np as la
from linattn_np.testing import relative_error
from tests.cases import PLAIN, call, cotangents, draw, parts, parts_like

every_variant = pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.fn.__name__)


@pytest.fixture(autouse=True)
def one_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def brought(case, arrays, batch=1, heads=1):
    """The arrays in blocks: along batch, time and heads."""

    def one(name, x):
        if not hasattr(x, "shape"):
            return x
        letters = case.given[name].split()
        chunks = {"T": 5, "H": heads, "Hk": heads, "Hq": heads}
        lead = (batch,) * (x.ndim - len(letters))
        return da.from_array(x, chunks=(*lead, *(chunks.get(n, -1) for n in letters)))

    return {n: one(n, x) for n, x in arrays.items()}


def state_of(state, chunks=(1, 1)):
    return parts_like(state, [da.from_array(S, chunks=(*chunks, *(-1,) * (S.ndim - 2))) for S in parts(state)])


def check(found, expected, bound=1e-13):
    for x, y in zip(parts(found), parts(expected), strict=True):
        assert isinstance(x, da.Array)
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        assert relative_error(x.compute(), y) <= bound


@every_variant
def test_every_variant(case):
    arrays, state = draw(case, H=4)
    result, pull = la.vjp(case.fn, **arrays, **case.options, state=state, return_state=True)
    found, pulled = la.vjp(case.fn, **brought(case, arrays, heads=2), **case.options, state=state_of(state),
                           return_state=True)  # fmt: skip
    check(found, result)
    check(call(case, brought(case, arrays, heads=2), state=state_of(state)), result)
    check(case.fn(**brought(case, arrays), **case.options), case.fn(**arrays, **case.options))
    dout, dstate = cotangents(result)
    check(pulled(da.from_array(dout), state_of(dstate)), pull(dout, dstate), 1e-12)
    check(pulled(da.from_array(dout)), pull(dout), 1e-12)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("fn", [fn for fn in la.VARIANTS if fn.spec.grows], ids=lambda fn: fn.__name__)
def test_caches_in_and_out(fn, ragged):
    """A cache has one length for all heads: these are one block where there is a cache."""
    rng, options = np.random.default_rng(0), {"cu_seqlens": [0, 4, 4, 9]} if ragged else {}
    B, lead = (1 if ragged else 2,), 3 if ragged else 2

    def blocks(x):
        return da.from_array(x, chunks=tuple(max(n - 1, 1) for n in x.shape))

    arrays = la.testing.sampling.sample(fn, rng, B=B, T=9, H=4, K=4, V=3)
    state = fn(**la.testing.sampling.sample(fn, rng, B=(lead,), T=3, H=4, K=4, V=3), return_state=True).state
    for state0 in (None, state):
        begin = None if state0 is None else parts_like(state0, list(map(blocks, parts(state0))))
        found, pulled = la.vjp(fn, **{n: blocks(x) for n, x in arrays.items()}, **options, state=begin,
                               return_state=True)  # fmt: skip
        result, pull = la.vjp(fn, **arrays, **options, state=state0, return_state=True)
        check(found, result)
        check(pulled(da.ones_like(found.out)), pull(np.ones_like(result.out)), 1e-12)


def test_caches_at_positions_are_refused():
    x = da.ones((1, 3, 1, 2))
    with pytest.raises(TypeError, match="alibi: return_states_at is given with dask arrays, expected None"):
        la.alibi(x, x, x, da.ones(1), return_states_at=[1])


RULE = next(c for c in PLAIN if c.fn is la.gated_delta_rule)


def test_few_tasks_and_none_before_compute():
    """Blocks that fit need one task each, and one to take out each result."""
    seen = []

    def noted(x, name):
        seen.append(name)
        return x

    arrays, _ = draw(RULE, B=(4,), T=512, H=4, K=8, V=8)
    lazy = {n: da.from_array(x, chunks=(2, -1, 2) + (-1,) * (x.ndim - 3)).map_blocks(noted, n, dtype=x.dtype)
            for n, x in arrays.items()}  # fmt: skip
    given = sum(len(x.__dask_graph__()) for x in lazy.values())
    seen.clear()
    (out, end), pull = la.vjp(la.gated_delta_rule, **lazy, return_state=True)
    grads = pull(out, end)
    assert not seen
    assert out.numblocks == (2, 1, 2, 1)
    assert end.numblocks == (2, 2, 1, 1)
    assert len(out.__dask_graph__()) <= given + 4 * 2
    assert len(grads.k.__dask_graph__()) <= given + 4 * 2 + 4 * 3
    expected = la.vjp(la.gated_delta_rule, **arrays, return_state=True)
    check((out, end), expected[0])
    assert seen
    check(grads, expected[1](*expected[0]), 1e-12)


@pytest.mark.parametrize(("Hq", "Hk", "H"), [(8, 4, 4), (2, 2, 4), (4, 2, 4)])
def test_groups_of_heads_stay_together(Hq, Hk, H):
    arrays, state = draw(RULE, H=H, Hq=Hq, Hk=Hk)
    check(call(RULE, brought(RULE, arrays), state=state_of(state)), call(RULE, arrays, state=state))


@pytest.mark.parametrize(
    "options", [{"reverse": True}, {"chunk_size": 4}, {"qk_l2norm": True}, {"num_threads": 2}], ids=str
)
def test_options(options):
    arrays, state = draw(RULE, dtype=np.float32)
    expected = call(RULE, arrays, state=state, **options)
    check(call(RULE, brought(RULE, arrays), state=state_of(state), **options), expected)


def test_a_ragged_batch_and_other_layouts():
    arrays, states = draw(RULE, B=(1,), N=3, H=4)
    options = {"cu_seqlens": [0, 5, 5, 12]}
    check(call(RULE, brought(RULE, arrays, heads=2), state=state_of(states), **options),
          call(RULE, arrays, state=states, **options))  # fmt: skip
    arrays, _state = draw(RULE, B=(2, 3), H=4)
    check(call(RULE, brought(RULE, arrays, heads=2)), call(RULE, arrays))
    turned = {n: np.moveaxis(x, 2, 3) for n, x in arrays.items()}
    lazy = {n: da.moveaxis(x, 2, 3) for n, x in brought(RULE, arrays, heads=2).items()}
    check(call(RULE, lazy, layout="heads_first"), call(RULE, turned, layout="heads_first"))
    one = {n: x[:, :, 0] for n, x in arrays.items()}
    lazy = {n: x[:, :, 0] for n, x in brought(RULE, arrays, heads=2).items()}
    check(la.step(la.gated_delta_rule, **lazy), la.step(la.gated_delta_rule, **one))


def test_queries_of_their_own_length_and_none():
    case = next(c for c in PLAIN if c.fn is la.linear_attention)
    arrays, _ = draw(case)
    arrays["q"] = arrays["q"][:, :7]
    for options in ({"causal": False}, {}):
        check(case.fn(**brought(case, arrays), **options), case.fn(**arrays, **options))
    arrays["q"] = None
    found = case.fn(**brought(case, arrays))
    assert found.out is None
    check(found.state, case.fn(**arrays).state)


def test_a_default_that_depends_on_the_number_of_heads():
    arrays, _ = draw(next(c for c in PLAIN if c.fn is la.retention), H=4)
    arrays.pop("g")
    lazy = {n: da.from_array(x, chunks=(1, -1, 1, -1)) for n, x in arrays.items()}
    out = la.retention(**lazy)
    assert out.numblocks == (2, 1, 1, 1)
    check(out, la.retention(**arrays))
    v = {n: arrays[n] for n in ("q", "k", "v")}
    check(la.lightning_attention(**lazy, slopes="lightning"), la.lightning_attention(**v, slopes="lightning"))


def test_states_are_not_written():
    arrays, state = draw(RULE)
    before, given = state.copy(), state_of(state)
    check(call(RULE, brought(RULE, arrays), state=given, overwrite_state=True), call(RULE, arrays, state=before))
    assert (given.compute() == before).all()
    assert (state == before).all()
    with pytest.raises(ValueError, match="overwrite_state=True was given to vjp"):
        la.vjp(la.gated_delta_rule, **brought(RULE, arrays), state=given, overwrite_state=True)


@pytest.mark.filterwarnings("ignore:Increasing number of chunks")
def test_options_that_array_calls_compute():
    arrays, state = draw(RULE, T=3)
    lazy = {n: da.from_array(x) for n, x in arrays.items()}
    found = la.gated_delta_rule(**lazy, state=da.from_array(state), return_states_at=[1, 3])
    check(found.states, la.gated_delta_rule(**arrays, state=state, return_states_at=[1, 3]).states)


def test_bad_input():
    arrays, _state = draw(RULE)
    lazy = brought(RULE, arrays)
    with pytest.raises(ValueError, match=r"gated_delta_rule: beta has shape \(2, 12\), expected"):
        la.gated_delta_rule(**lazy | {"beta": lazy["beta"][:, :, 0]})
    with pytest.raises(TypeError, match="expected all arrays in one library"):
        la.gated_delta_rule(**lazy | {"beta": arrays["beta"]})
    with pytest.raises(ValueError, match="gated_delta_rule: q has chunks of unknown sizes, expected known ones"):
        la.gated_delta_rule(**lazy | {"q": lazy["q"][lazy["q"][:, 0, 0, 0] > 0]})
    out, pull = la.vjp(la.gated_delta_rule, **lazy)
    with pytest.raises(ValueError, match=r"gated_delta_rule: dout has shape \(2, 12, 2\), expected \(2, 12, 2, 3\)"):
        pull(out[..., 0])
    with pytest.raises(TypeError, match="got neither dout nor dstate"):
        pull()
    with pytest.raises(TypeError, match="qk_l2norm is 1, expected True or False"):
        la.gated_delta_rule(**lazy, qk_l2norm=1)
    wrong = lazy | {"g": -lazy["g"]}
    with pytest.raises(ValueError, match=r"gated_delta_rule: g is .*expected"):
        la.gated_delta_rule(**wrong, check=True).compute()


def test_explain_speaks_of_a_block():
    arrays, state = draw(RULE, B=(4,))
    lazy = brought(RULE, arrays)
    found = la.explain(la.gated_delta_rule, **lazy, state=state_of(state))
    one = la.explain(la.gated_delta_rule, **{n: x[:1, :, :1] for n, x in arrays.items()}, state=state[:1, :1])
    assert found.backend == one.backend
    assert found.operations == one.operations
    assert "of each block" in found.reason


def test_blocks_travel(tmp_path):
    """Tasks can be pickled, for schedulers of many machines."""
    import pickle

    arrays, _ = draw(RULE)
    out, pull = la.vjp(la.gated_delta_rule, **brought(RULE, arrays))
    graph = pull(out).q.__dask_graph__()
    assert all(pickle.loads(pickle.dumps(task)) is not None for task in itertools.islice(dict(graph).values(), 50))
