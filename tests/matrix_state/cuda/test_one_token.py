"""One token of every change of variables on arrays that look like CuPy's, and on a GPU: results, gradients, replays."""

from __future__ import annotations

import array_api_compat
import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from tests.cases import parts
from tests.matrix_state.cuda.step_twin import stub
from tests.matrix_state.cuda.token import host as step_calls

launched, public = step_calls.launched, step_calls.public
B, H = 2, 4
OPTIONS = {
    "-": {}, "softplus": {"dt_softplus": True}, "raw": {"qk_l2norm": True, "A_log": True},
    "elu": {"feature_map": "elu+1"}, "mean": {"feature_map": "elu+1", "normalize": True},
    "bounded": {"qk_l2norm": True, "l2norm_eps": 1e-6, "A_log": True, "lower_bound": -5.0},
    "unit": {"qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": True},
    "steps": {"solver": "conjugate_gradients", "iterations": 3},
}  # fmt: skip
TABLE = """
    hgrn2 -, longhorn -, efla -, gdn2 -, mamba2 softplus, kda raw, gated_delta_rule raw, linear_attention elu, gsa -,
    abc -, mlstm -, linear_attention mean, based -, rebased -, performer -, rfa -, retention -, gla -, mesa_net -,
    mesa_net steps, transxssm -, retnet -, delta_product -, comba raw, gdn2 raw, rwkv7 -, dplr -, kda bounded,
    delta_rule unit
"""
CALLS = {" ".join(row.split()): (getattr(la, row.split()[0]), OPTIONS[row.split()[1]], None)
         for row in TABLE.split(",")}  # fmt: skip
CALLS |= {  # keys wider than the kernel, in blocks of channels
    "gla wide": (la.gla, {}, 520), "linear_attention wide": (la.linear_attention, {}, 264),
    "linear_attention wide mean": (la.linear_attention, OPTIONS["mean"], 300),
    "retention wide": (la.retention, {}, 257), "simple_gla wide": (la.simple_gla, {}, 320),
    "delta_rule wide": (la.delta_rule, {}, 264), "gated_delta_rule wide": (la.gated_delta_rule, {}, 320),
    "comba wide": (la.comba, {}, 260),
    "performer wide": (la.performer, {"num_features": 300, "seed": 3}, None),
    "rfa wide": (la.rfa, {"num_features": 150}, None),
}  # fmt: skip
WIDE = ("g", "beta", "A_log", "dt_bias", "A", "D", "dt", "i", "f", "s", "gv", "b")  # float32 beside 16-bit vectors
SLACK = 2e-5  # of sums of up to 520 products in float32, against float64


def drawn(name, seed=0, D=8):
    """(fn, arrays of one token by name, options, a state), in NumPy."""
    fn, options, K = CALLS[name]
    rng = np.random.default_rng(seed)
    names = {*fn.spec.arrays, *fn.spec.options}
    K, V = K or (8 if names & {"order", "gamma"} else D), D  # products of channels are features

    def sample(T):
        optional = bool(names & {"D", "sigma"}) and "theta" not in names
        found = la.testing.sample(fn, rng, B=(B,), T=T, H=H, Hk=H, Hq=H, K=K, V=V, optional=optional)
        return {n: x.astype(np.float32) for n, x in found.items()}

    arrays, before = sample(1), sample(3)
    more = {n: x for n, x in options.items() if n != "A_log"}
    if "A_log" in options:
        bias = rng.uniform(0, 1, (H, K) if "K" in fn.spec.arrays["dt_bias"].axes else H)
        raw = {"A_log": rng.uniform(0, 1, H).astype(np.float32), "dt_bias": bias.astype(np.float32)}
        arrays, before = arrays | raw, before | raw
    return fn, arrays, more, fn(**before, **more, return_state=True)[1]


def each(state, how):
    """A state with a function of each part."""
    return type(state)(*map(how, state)) if isinstance(state, tuple) else how(state)


def called(fn, arrays, more, state, how, there):
    """[out, the parts of the state]; there: what brings an array to the device."""
    mine, own = {n: there(x) for n, x in arrays.items()}, each(state, there)
    given = more | {"state": own, "return_state": True} | ({"overwrite_state": True} if how == "in place" else {})
    if how == "step":
        mine = {n: there(arrays[n][:, 0]) if x.ndim > 2 and x.shape[:2] == (B, 1) else x for n, x in mine.items()}
        out, end = la.step(fn, **mine, **given)
        return [out[:, None], *parts(end)]
    out, end = fn(**mine, **given)
    if how == "in place":
        assert all(x is y for x, y in zip(parts(end), parts(own), strict=True))
    return [out, *parts(end)]


def pulled(fn, arrays, more, state, douts):
    """[out, parts of the state, gradients] of a vjp with a state; douts: of the output and the parts of the state."""
    result, pull = la.vjp(fn, **arrays, **more, state=state, return_state=True)
    dstate = type(state)(*douts[1:]) if isinstance(state, tuple) else douts[1]
    return [*parts(result), *(y for x in pull(douts[0], dstate) for y in parts(x) if y is not None)]


def flat(found):
    """Arrays of a result, states flattened."""
    return [y for x in found for y in parts(x)]


def cotangents(found):
    rng = np.random.default_rng(1)
    return [rng.standard_normal(x.shape).astype(np.float32) for x in found]


def check(found, expected, slack):
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        assert np.abs(x - y).max() <= slack * max(1, np.abs(y).max())


@pytest.mark.parametrize("how", ["new", "in place", "step"])
@pytest.mark.parametrize("name", CALLS)
def test_results_are_numpys(public, name, how):
    """The same bits from a first call and from a repeated one, on other numbers too."""
    for seed in range(2):
        fn, arrays, more, state = drawn(name, seed)
        out, end = fn(**arrays, **more, state=state, return_state=True)
        first = called(fn, arrays, more, state, how, stub)
        again = called(fn, arrays, more, state, how, stub)
        check(first, [out, *parts(end)], SLACK)
        assert [np.asarray(x).tobytes() for x in first] == [np.asarray(x).tobytes() for x in again]


@pytest.mark.parametrize("element", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_is_kernels_alone(public, name, element):
    """No array calls around them, which take the host many times as long."""
    fn, arrays, more, state = drawn(name)
    arrays = {n: x if n in WIDE else x.astype(element) for n, x in arrays.items()}
    replay.clear()
    fn(**{n: stub(x) for n, x in arrays.items()}, **more, state=each(state, stub), return_state=True)
    assert len(replay.by_key) == 1
    assert not replay.reasons


@pytest.mark.parametrize("name", CALLS)
def test_outputs_of_16_bits(public, name):
    fn, arrays, more, state = drawn(name)
    arrays = {n: x if n in WIDE else x.astype(ml_dtypes.bfloat16) for n, x in arrays.items()}
    expected, end = fn(**{n: x.astype(np.float32) for n, x in arrays.items()}, **more, state=state, return_state=True)
    for _ in range(2):
        out, *last = called(fn, arrays, more, state, "new", stub)
        assert out.dtype == ml_dtypes.bfloat16
        for x, y in zip([out, *last], [expected, *parts(end)], strict=True):
            assert np.abs(x.astype(np.float32) - y).max() <= 2**-6 * np.abs(y).max()


@pytest.mark.parametrize("name", CALLS)
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(public, name):
    fn, arrays, more, state = drawn(name)
    found = called(fn, arrays, more, state, "new", stub)
    one = {n: x[:1] if x.shape[:2] == (B, 1) else x for n, x in arrays.items()}
    alone = called(fn, one, more, each(state, lambda S: S[:1]), "new", stub)
    for x, y in zip(found, alone, strict=True):
        assert np.array_equal(x[:1], y)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_numpys(public, monkeypatch, name):
    """The same bits from a first vjp and from repeated ones; the core's backward is array calls."""
    step_calls.backward_by_array_calls(monkeypatch)
    fn, arrays, more, state = drawn(name)
    douts = cotangents(flat(fn(**arrays, **more, state=state, return_state=True)))
    expected = pulled(fn, arrays, more, state, douts)
    bits = []
    for _ in range(3):
        there = {n: stub(x) for n, x in arrays.items()}
        found = pulled(fn, there, more, each(state, stub), list(map(stub, douts)))
        check(flat(found), flat(expected), 1e-4)
        bits.append([np.asarray(x).tobytes() for x in flat(found)])
    assert bits[0] == bits[1] == bits[2]


@pytest.mark.parametrize("name", CALLS)
def test_states_of_a_longer_call(public, name):
    """States as several tokens leave them, whatever their strides: the results of states that lie densely."""
    fn, arrays, more, state = drawn(name)
    apart = each(state, lambda S: stub(np.repeat(S, 2, axis=-1))[..., ::2] if S.ndim > 2 else stub(S))
    there = {n: stub(x) for n, x in arrays.items()}
    found = [fn(**there, **more, state=S, return_state=True) for S in (each(state, stub), apart, apart)]
    for x, *others in zip(*map(flat, found), strict=True):
        assert all(np.array_equal(x, y) for y in others)


def test_a_map_of_array_calls(public):
    """A running sum, which no kernel computes."""

    def running(x):
        return array_api_compat.array_namespace(x).cumulative_sum(x, axis=-1)

    fn, arrays, _, state = drawn("linear_attention elu")
    more = {"feature_map": (running, lambda x, d: d)}
    expected = fn(**arrays, **more, state=state, return_state=True)
    for _ in range(2):
        check(called(fn, arrays, more, state, "in place", stub), expected, 1e-5)


def on_device(cp, name, D):
    """What `drawn` gives, in float64 and on the device."""
    fn, arrays, more, state = drawn(name, 0, D)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}, each(state, lambda S: S.astype(np.float64))
    return fn, more, wide, ({n: cp.asarray(x) for n, x in arrays.items()}, each(state, cp.asarray))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_16_bits_on_a_gpu(cp, name):
    """Against NumPy in float64."""
    fn, arrays, more, state = drawn(name, 0, 128)
    arrays = {n: x if n in WIDE else x.astype(ml_dtypes.bfloat16) for n, x in arrays.items()}
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected = fn(**wide, **more, return_state=True, state=each(state, lambda S: S.astype(np.float64)))
    there, before = {n: cp.asarray(x) for n, x in arrays.items()}, each(state, cp.asarray)
    replay.clear()
    for _ in range(2):
        for x, y in zip(flat(fn(**there, **more, state=before, return_state=True)), flat(expected), strict=True):
            assert np.abs(x.get().astype(np.float64) - y).max() <= 2**-6 * np.abs(y).max()


@pytest.mark.gpu
@pytest.mark.parametrize("D", [8, 128])
@pytest.mark.parametrize("name", CALLS)
def test_results_on_a_gpu(cp, name, D):
    """Against NumPy in float64; the same bits from a first call, a repeated one, in place, and alone."""
    fn, more, wide, (there, before) = on_device(cp, name, D)
    expected = flat(fn(**wide[0], **more, state=wide[1], return_state=True))
    replay.clear()
    found = [fn(**there, **more, state=before, return_state=True) for _ in range(2)]
    found.append(fn(**there, **more, state=each(before, cp.copy), return_state=True, overwrite_state=True))
    first = {n: x[:1] if x.shape[:2] == (B, 1) else x for n, x in there.items()}
    alone = fn(**first, **more, state=each(before, lambda S: S[:1]), return_state=True)
    results = [[x.get() for x in flat(one)] for one in (*found, alone)]
    check(results[0], expected, SLACK)
    for x, *others, y in zip(*results, strict=True):
        assert all(x.tobytes() == z.tobytes() for z in others)
        assert np.array_equal(x[:1], y)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [8, 128])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_on_a_gpu(cp, name, D):
    """Against NumPy in float64; the same bits from a first pullback and repeated ones."""
    fn, more, wide, (there, before) = on_device(cp, name, D)
    douts = cotangents(flat(fn(**wide[0], **more, state=wide[1], return_state=True)))
    expected = flat(pulled(fn, wide[0], more, wide[1], [d.astype(np.float64) for d in douts]))
    replay.clear()
    given = [*map(cp.asarray, douts)]
    results = [[x.get() for x in flat(pulled(fn, there, more, before, given))] for _ in range(3)]
    check(results[0], expected, 1e-4)
    for x, *others in zip(*results, strict=True):
        assert all(x.tobytes() == z.tobytes() for z in others)
