"""Mistakes that are often made in calls: each has a message that names it, with check=True if its shapes are right."""

from __future__ import annotations

import functools
import re
import types
import warnings

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.binding import axes_of
from linattn_np.call.layouts import LAYOUTS
from linattn_np.call.options import COMMON
from linattn_np.variants.shared.attention import MAP_STRENGTH
from tests.cases import in_dtype

B, T, H, K, V = 2, 16, 4, 8, 6
RNG = np.random.default_rng(0)
Q = RNG.standard_normal((B, T, H, K))
RAW = RNG.standard_normal((B, T, H, K))  # keys that are not normalised
UNIT = RAW / np.linalg.norm(RAW, axis=-1, keepdims=True)
VALUES = RNG.standard_normal((B, T, H, V))
G, BETA = -RNG.random((B, T, H)), RNG.random((B, T, H))
DT, A = RNG.random((B, T, H)), -RNG.random(H)
GOOD = {"q": Q, "k": UNIT, "v": VALUES, "g": G, "beta": BETA}
STATE = np.zeros((B, H, K, V))
WITH_NAN = VALUES.copy()
WITH_NAN[1, 3, 2, 0] = np.nan


def heads_first(x):
    return np.moveaxis(x, 1, 2)


def frame(name):
    """An object of a class with this name that is no array."""
    return type(name, (), {})()


def named(name):
    return getattr(la, name)


ARGUMENTS = [  # changes of GOOD for gated_delta_rule, and the message
    ({"k": UNIT[..., :5]}, "k has shape (2, 16, 4, 5), expected (B, T, Hk, K) = (2, 16, Hk, 8)"),
    ({"v": VALUES[:, :10]}, "v has shape (2, 10, 4, 6), expected (B, T, H, V) = (2, 16, 4, V)"),
    ({"v": VALUES[0]}, "v has shape (16, 4, 6), expected (B, T, H, V) = (2, 16, 4, V)"),
    ({"q": Q.astype(int)}, "expected one of float16, bfloat16, float32, float64: q.astype('float32') converts"),
    ({"q": Q.tolist()}, "q is a list, expected an array (...): numpy.asarray(q) makes one"),
    ({"v": frame("DataFrame")}, "v is a DataFrame, expected an array (...): v.to_numpy() makes one"),
    ({"v": frame("DataArray")}, "v is a DataArray, expected an array (...): v.data makes one"),
    ({"q": Q.astype(complex)}, "q has dtype complex128, expected one of float16, bfloat16, float32, float64"),
    ({"q": np.ma.masked_array(Q)}, "q is a numpy.ma.MaskedArray, expected a plain array"),
    ({"beta": None}, "beta is missing, expected the arrays q, k, v, g, beta"),
    ({"g": Q}, "g has shape (2, 16, 4, 8), expected (B, T, H) = (2, 16, 4): one log decay a key channel is for la.kda"),
    ({"g": G[..., None]}, "g has shape (2, 16, 4, 1), expected (B, T, H) = (2, 16, 4)"),
    ({"beta": BETA[..., None]}, "beta has shape (2, 16, 4, 1), expected (B, T, H) = (2, 16, 4)"),
    ({n: heads_first(GOOD[n]) for n in "qkv"}, "g has shape (2, 16, 4), expected (B, T, H) = (2, 4, 16)"),
    (
        {"q": np.concatenate([Q, Q], 2), "v": VALUES[:, :, :2], "g": G[..., :2], "beta": BETA[..., :2]},
        "keys have Hk = 4 heads and values H = 2, expected Hk to divide H",
    ),
    ({"state": np.zeros((B, H, V, K))}, "state has shape (2, 4, 6, 8), expected (B, H, K, V) = (2, 4, 8, 6)"),
    ({"overwrite_state": True}, "overwrite_state=True without a state"),
    ({"cu_seqlens": [0, 8, 16]}, "cu_seqlens needs one packed batch row, got batch axes (2,)"),
    ({"state": np.zeros((5, H, K, V)), "state_rows": [1, 1]}, "state_rows is [1, 1], expected no row twice"),
    ({"state": np.zeros((5, H, K, V)), "state_rows": [1, 7]}, "expected rows of a pool of 5: from 0 to 4"),
    ({"layout": "bhtd"}, "layout is 'bhtd', expected 'time_first' or 'heads_first'"),
    ({"backend": "numpy"}, "backend is 'numpy' (did you mean 'chunks'?), expected None or one of"),
    ({"backend": "gpu"}, "backend is 'gpu' (did you mean 'cuda'?), expected None or one of"),
    ({"backend": "cuda"}, "backend 'cuda' does not cover this call: the arrays are not CuPy arrays"),
    ({"chunk_size": 0}, "chunk_size is 0, expected None, 'parallel' or a whole number from 1"),
    ({"chunk_size": 64.0}, "chunk_size is 64.0, expected None, 'parallel' or a whole number from 1"),
    ({"num_threads": 0}, "num_threads is 0, expected None or a whole number from 1"),
    ({"scale": "auto"}, "scale is 'auto', expected None or a real number"),
    ({"initial_state": STATE}, "unknown option 'initial_state' (did you mean state?)"),
    ({"output_final_state": True}, "unknown option 'output_final_state' (did you mean return_state?)"),
    ({"use_qk_l2norm_in_kernel": True}, "unknown option 'use_qk_l2norm_in_kernel' (did you mean qk_l2norm?)"),
    ({"qk_l2_norm": True}, "unknown option 'qk_l2_norm' (did you mean qk_l2norm?)"),
    ({"head_first": True}, "unknown option 'head_first' (did you mean layout='heads_first'?)"),
    ({"log_decay": G}, "unknown option 'log_decay' (did you mean g?)"),
    ({"chunksize": 64}, "unknown option 'chunksize' (did you mean chunk_size?)"),
    ({"nonsense": 1}, "unknown option 'nonsense', expected one of"),
]
NUMBERS = [  # what only check=True finds
    ({"k": RAW}, "k has beta |k|^2 = ... the step multiplies the state by -... qk_l2norm=True divides"),
    ({"g": -G}, "g is ..., expected <= 0"),
    ({"g": -5 * G}, "g is ..., expected <= 0: it is the log of a decay; perhaps -g is meant"),
    ({"g": np.exp(G)}, "a decay between 0 and 1 enters as its logarithm, log(g)"),
    ({"g": BETA, "beta": G}, "g and beta seem to be exchanged"),
    ({"beta": BETA - 3}, "beta is -..., expected 0 to 2"),
    ({"beta": BETA + 3}, "beta is 3..., expected 0 to 2"),
    ({"v": WITH_NAN}, "v is NaN at 1 of 768 places, first at batch 1, token 3, head 2, channel 0"),
    ({"v": np.where(np.isnan(WITH_NAN), -np.inf, WITH_NAN)}, "v is inf at 1 of 768 places"),
    ({"state": np.full((B, H, K, V), np.nan)}, "state is NaN at 384 of 384 places"),
]


def pattern(text):
    """The text to the letter; "..." stands for anything."""
    return ".*".join(map(re.escape, text.split("...")))


@pytest.mark.parametrize(("changed", "text"), ARGUMENTS, ids=[text for _, text in ARGUMENTS])
def test_arguments(changed, text):
    with pytest.raises((TypeError, ValueError), match=pattern(text)):
        la.gated_delta_rule(**{**GOOD, **changed})


@pytest.mark.parametrize(("changed", "text"), NUMBERS, ids=[text for _, text in NUMBERS])
def test_numbers(changed, text):
    call = {**GOOD, **changed}
    assert any(re.search(pattern(text), str(found)) for found in la.check(la.gated_delta_rule, **call))
    for _ in range(2):  # a call that is checked is never replayed
        with pytest.raises(ValueError, match=pattern(text)):
            la.gated_delta_rule(**call, check=True)
        with pytest.raises(ValueError, match=pattern(text)):
            la.vjp(la.gated_delta_rule, **call, check=True)


@pytest.mark.parametrize("name", [s.name for s in la.SPECS if s.arrays.get("beta") is MAP_STRENGTH])
def test_maps_that_stretch(name):
    """beta |w|^2 > 2 multiplies queries and keys by less than -1; a reflection is meant."""
    fn, w = getattr(la, name), GOOD["k"]
    assert la.check(fn, Q, RAW, VALUES, w, np.full((B, T, H), 2.0)) == []
    text = "w has beta |w|^2 = 8 at token 3, head 1, expected 0 to 2: the step multiplies queries and keys by -7 along"
    longer = w.copy()
    longer[1, 3, 1] *= 2
    with pytest.raises(ValueError, match=pattern(text)):
        fn(Q, RAW, VALUES, longer, np.full((B, T, H), 2.0), check=True)


@pytest.mark.parametrize(
    ("fn", "arrays", "text"),
    [
        (
            la.linear_attention,
            (Q[0, :, 0], RAW[0, :, 0], VALUES[0, :, 0]),
            "v has shape (16, 6), expected (..., T, H, V); a sequence of one head is x[:, None, :]",
        ),
        (la.simple_gla, (Q, RAW, VALUES, G[0]), "g has shape (16, 4), expected (B, T, H) = (2, 16, 4)"),
    ],
)
def test_ranks(fn, arrays, text):
    with pytest.raises(ValueError, match=pattern(text)):
        fn(*arrays)


def test_options_of_one_function():
    text = "unknown option 'gk' (did you mean g of la.gla or la.kda, one log decay a key channel?)"
    with pytest.raises(TypeError, match=pattern(text)):
        la.simple_gla(Q, RAW, VALUES, gk=G)
    with pytest.raises(TypeError, match=pattern("unknown option 'use_qk_l2norm_in_kernel', expected one of")):
        la.simple_gla(Q, RAW, VALUES, G, use_qk_l2norm_in_kernel=True)  # it has no qk_l2norm
    with pytest.raises(ValueError, match="feature_map is 'softmax', expected one of 'identity'"):
        la.linear_attention(Q, RAW, VALUES, feature_map="softmax")


@pytest.mark.parametrize(
    ("fn", "arrays", "options", "text"),
    [
        (
            la.linear_attention,
            (Q, RAW, VALUES),
            {"normalize": True},
            "q has negative entries and feature_map is 'identity'",
        ),
        (la.mamba2, (VALUES, DT, -A, UNIT, Q), {}, "A is ..., expected <= 0: with A_log, A is -exp(A_log)"),
        (la.mamba2, (VALUES, -DT, A, UNIT, Q), {}, "dt is -..., expected >= 0"),
    ],
)
def test_numbers_of_one_function(fn, arrays, options, text):
    with pytest.raises(ValueError, match=pattern(text)):
        fn(*arrays, **options, check=True)


def test_raw_projections_have_no_limits():
    raw = {"A_log": np.zeros(H), "dt_bias": np.zeros(H)}
    assert la.check(la.gated_delta_rule, **GOOD | {"g": -G}, **raw) == []
    assert la.check(la.mamba2, VALUES, -DT, A, UNIT, Q, dt_softplus=True) == []
    assert la.check(la.gated_delta_rule, **GOOD | {"g": np.full((B, T, H), -np.inf)})[0].is_error is False


@pytest.mark.parametrize(
    ("fn", "call", "text"),
    [
        (
            la.gated_delta_rule,
            {n: heads_first(x) for n, x in GOOD.items()},
            "v has 4 tokens of 16 heads in the layout (..., T, H, V): if it is (..., H, T, V), pass layout='heads_first'",  # noqa: E501
        ),
        (
            la.gated_delta_rule,
            {n: x[0] for n, x in GOOD.items()} | {"return_state": True},
            "v has no batch axis: its first axis, 16, is read as time; one token of 16 sequences is la.step(",
        ),
        (la.gated_delta_rule, GOOD | {"g": G - 60}, "g is below -50 everywhere"),
        (
            la.gla,
            {"q": Q, "k": UNIT, "v": VALUES, "g": -np.abs(RAW), "gate_lower_bound": -0.5},
            "gate_lower_bound=-0.5",
        ),
        (la.iplr, {"q": Q, "k": UNIT, "v": VALUES, "a": UNIT, "b": UNIT}, "b has -a.b = -1 at token"),
        (
            la.gated_delta_rule,
            GOOD | {"layout": "heads_first"},
            "v has 16 heads of 4 tokens in the layout (..., H, T, V): if it is (..., T, H, V), leave out layout=",
        ),
        (
            la.gla,
            {"q": Q, "k": UNIT, "v": Q, "g": -np.abs(RAW), "state": RNG.standard_normal((B, H, K, K)).mT},
            "state is a transposed view (2, 4, 8, 8), whose memory is (..., V, K)",
        ),
        (la.based, {"q": Q, "k": Q, "v": VALUES[..., :5], "normalize": False, "order": 1, "scale": 0}, "scale is 0"),
    ],
)
def test_doubts_are_warnings(fn, call, text):
    with pytest.warns(UserWarning, match=pattern(text)) as caught:
        fn(**call, check=True)
    assert caught[0].filename == __file__
    assert not any(found.is_error for found in la.check(fn, **call))


def test_the_result_of_vjp_is_unpacked_into_two_names():
    x = np.ones((1, 3, 1, 2))
    out, pullback = la.vjp(la.linear_attention, x, x, x, check=True)
    assert pullback(out).q.shape == x.shape


def test_unpacked_outputs():
    with pytest.raises(ValueError, match="the result is unpacked into two names but is one array"):
        out, state = la.gated_delta_rule(**GOOD, check=True)
    out, state = la.gated_delta_rule(**GOOD, check=True, return_state=True)
    assert (out.shape, state.shape) == (VALUES.shape, STATE.shape)
    one = la.gated_delta_rule(**GOOD, check=True)
    assert np.array_equal(one, la.gated_delta_rule(**GOOD))


@pytest.mark.parametrize(
    ("dtype", "large", "text"),
    [
        (np.float64, 1e200, "the products of keys and values"),
        (np.float32, 1e30, "the products of keys and values"),
        (np.float64, 1e105, "the outputs"),
        (np.float16, 100, "the outputs"),
    ],
)
def test_numbers_that_overflow(dtype, large, text):
    x = {n: (large * y).astype(dtype) for n, y in (("q", Q), ("k", RAW), ("v", VALUES))}
    (found,) = la.check(la.simple_gla, **x, g=G.astype(dtype))
    assert str(found).endswith(f"; {text} may overflow")
    assert " is too large: q up to " in str(found)
    assert not found.is_error


@pytest.mark.parametrize(("axis", "text"), [(1, "tokens"), (2, "heads")])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_lengths_along_another_axis(axis, text, dtype):
    k = (RAW / np.linalg.norm(RAW, axis=axis, keepdims=True)).astype(dtype)
    (found,) = (one for one in la.check(la.gated_delta_rule, **GOOD | {"k": k}) if "length 1" in str(one))
    assert str(found).startswith(f"k has length 1 along its {text}, expected along its channels, the last axis")
    assert found.is_error


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_the_layout_of_one_token_is_no_option(fn):
    call = la.testing.sample(fn, np.random.default_rng(1), T=1)
    for run in (fn, *(functools.partial(one, fn) for one in (la.vjp, la.explain, la.check))):
        with pytest.raises(ValueError, match="layout is 'one_token', expected 'time_first' or 'heads_first'"):
            run(**call, layout="one_token")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_good_calls_raise_no_doubt(fn, dtype):
    """Samples with a state, in both layouts: of the ways to take one array for another none is found."""
    words = ("length 1", "too large", "transposed view", "scale", "heads of")
    for options in fn.samples.options or ({},):
        drawn = la.testing.sample(fn, np.random.default_rng(1), T=16, K=6, V=6)
        drawn = {n: in_dtype(x, dtype) for n, x in drawn.items()}
        state = la.testing.sample_state(fn, np.random.default_rng(2), (2,), options, K=6, V=6)
        axes = axes_of(fn.spec, {**COMMON, **fn.spec.options, **options})
        turned = {n: LAYOUTS["heads_first"].leave(np, x, axes[n], (2,)) for n, x in drawn.items()}
        for arrays, layout in ((drawn, "time_first"), (turned, "heads_first")):
            found = la.check(fn, **arrays, **options, state=state, layout=layout)
            assert not [str(one) for one in found if any(word in str(one) for word in words)]


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_calls_in_the_intended_range(fn):
    """No error, and with check=True the same bits."""
    for options in fn.samples.options:
        call = la.testing.sample(fn, np.random.default_rng(1)) | dict(options)
        assert not [str(found) for found in la.check(fn, **call) if found.is_error]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found = fn(**call, check=True)
        assert np.array_equal(found, fn(**call))


def test_pullbacks():
    pullback = la.vjp(la.gated_delta_rule, **GOOD)[1]
    with pytest.raises(TypeError, match=pattern("dout is a float, ...: the gradient of the loss with respect to out")):
        pullback(1.0)
    with pytest.raises(ValueError, match=pattern("dout has shape (2, 4, 16, 6), expected (2, 16, 4, 6)")):
        pullback(np.zeros((B, H, T, V)))
    with pytest.raises(TypeError, match="vjp: fn is 'sum', expected a function of linattn_np"):
        la.vjp(np.sum, Q)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gated_deltanet", " (did you mean la.gated_delta_rule?)"),
        ("mamba", " (did you mean la.mamba2?)"),
        ("attention", " (did you mean la.linear_attention?)"),
        ("lightning", " (did you mean la.lightning_attention?)"),
        ("chunk_gla", " (did you mean la.gla?)"),
        ("fused_recurrent_rwkv6", " (did you mean la.rwkv6?)"),
        ("retentoin", " (did you mean la.retention?)"),
        ("softmax_attn", " (did you mean la.softmax_attention?)"),
        ("scaled_dot_product_attention", " (did you mean la.softmax_attention?)"),
        ("nonsense", ""),
        ("_private", ""),
    ],
)
def test_names(name, text):
    with pytest.raises(AttributeError, match=re.escape(f"has no attribute '{name}'{text}") + "$"):
        named(name)


def test_check_takes_a_variant():
    with pytest.raises(TypeError, match="check: fn is 'sum', expected a variant of linattn_np"):
        la.check(np.sum, Q)
    assert isinstance(la.check, types.FunctionType)
    assert la.check(la.gated_delta_rule, **GOOD) == []
    assert la.check(la.simple_gla, **{n: x[:, :0] for n, x in GOOD.items() if n != "beta"}) == []
