"""Every wrong call raises an error of one form: function, argument, what came, what was expected."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from tests.nn.table import SMALL

B, T, H, K, V = 2, 64, 4, 8, 5
RNG = np.random.default_rng(0)
Q, KEYS = RNG.standard_normal((2, B, T, H, K))
VALUES = RNG.standard_normal((B, T, H, V))
G, BETA = -RNG.random((B, T, H)), RNG.random((B, T, H))
STATE, SUM = np.zeros((B, H, K, V)), np.ones((B, H, K))
GOOD = {"q": Q, "k": KEYS, "v": VALUES, "g": G, "beta": BETA}
FLOATS = "expected one of float16, bfloat16, float32, float64..."  # what to call instead: test_mistakes.py
ARRAY = "expected an array (NumPy, CuPy, PyTorch, JAX, or anything with __dlpack__)..."


def sentence(text):
    """The whole message, to the letter; "..." stands for anything."""
    return "^" + ".*".join(map(re.escape, text.split("..."))) + "$"


def refuse(error, text, fn, *arrays, **options):
    with pytest.raises(error, match=sentence(text)):
        fn(*arrays, **options)
    if hasattr(fn, "vjp"):
        with pytest.raises(error, match=sentence(text)):
            la.vjp(fn, *arrays, **options)


def gated(error, text, **changed):
    """The gated delta rule with some of its arguments changed."""
    refuse(error, f"gated_delta_rule: {text}", la.gated_delta_rule, **{**GOOD, **changed})


SHAPES = [
    ("beta", BETA[..., None], "beta has shape (2, 64, 4, 1), expected (B, T, H) = (2, 64, 4)"),
    ("beta", BETA[:, :, :3], "beta has shape (2, 64, 3), expected (B, T, H) = (2, 64, 4)"),
    ("beta", BETA[0], "beta has shape (64, 4), expected (B, T, H) = (2, 64, 4)"),
    ("g", G[:, 1:], "g has shape (2, 63, 4), expected (B, T, H) = (2, 64, 4)"),
    ("k", KEYS[..., :7], "k has shape (2, 64, 4, 7), expected (B, T, Hk, K) = (2, 64, Hk, 8)"),
    ("q", np.moveaxis(Q, 1, 2), "q has shape (2, 4, 64, 8), expected (B, T, Hq, K) = (2, 64, Hq, 8)"),
    ("q", np.concatenate([Q, Q], 1), "q has shape (2, 128, 4, 8), expected (B, T, Hq, K) = (2, 64, Hq, 8)"),
    ("q", Q[:1], "q has shape (1, 64, 4, 8), expected (B, T, Hq, K) = (2, 64, Hq, 8)"),
    ("v", VALUES[0], "v has shape (64, 4, 5), expected (B, T, H, V) = (2, 64, 4, V)"),
    ("v", VALUES[None], "v has shape (1, 2, 64, 4, 5), expected (B, T, H, V) = (2, 64, 4, V)"),
    ("v", VALUES[0, 0], "v has shape (4, 5), expected (..., T, H, V); a sequence of one head is x[:, None, :]"),
    ("v", np.float64(3), "v has shape (), expected (..., T, H, V)"),
    ("k", KEYS[:, :, :3], "keys have Hk = 3 heads and values H = 4, expected Hk to divide H"),
    ("k", np.concatenate([KEYS, KEYS], 2), "keys have Hk = 8 heads and values H = 4, expected Hk to divide H"),
    ("q", Q[:, :, :3], "queries have Hq = 3 heads and values H = 4, expected one to divide the other"),
    ("q", Q[:, :, :0], "queries have Hq = 0 heads and values H = 4, expected one to divide the other"),
]


@pytest.mark.parametrize(("name", "wrong", "text"), SHAPES, ids=[f"{n} {x.shape}" for n, x, _ in SHAPES])
def test_rank_size_and_heads(name, wrong, text):
    gated(ValueError, text, **{name: wrong})


def test_three_numbers_of_heads():
    gated(
        ValueError,
        "queries have 1 heads, keys 2 and values 4, expected at most two different numbers of heads",
        q=Q[:, :, :1],
        k=KEYS[:, :, :2],
    )


def test_messages_name_the_callers_layout():
    transposed = {n: np.moveaxis(x, 1, 2) for n, x in GOOD.items()}
    transposed["layout"] = "heads_first"
    gated(ValueError, "beta has shape (2, 64, 4), expected (B, H, T) = (2, 4, 64)", **transposed | {"beta": BETA})
    gated(ValueError, "q has shape (2, 64, 4, 8), expected (B, Hq, T, K) = (2, Hq, 64, 8)", **transposed | {"q": Q})
    refuse(
        ValueError,
        "read: q has shape (2, 64, 4, 8), expected (B, Hq, T, K) = (2, Hq, T, 3)",
        la.read,
        Q,
        STATE[:, :, :3],
        layout="heads_first",
    )


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize(
    "dtype",
    ["int64", "int8", "bool", "complex64", "complex128", "longdouble", "object", "U1", ml_dtypes.float8_e4m3fn],
    ids=str,
)
def test_dtypes(name, dtype):
    wrong = np.ones(GOOD[name].shape).astype(dtype)
    gated(TypeError, f"{name} has dtype {wrong.dtype}, {FLOATS}", **{name: wrong})


def test_names_of_the_variants_own_arrays():
    x, dt, A = VALUES, np.ones((B, T, H)), -np.ones(H)
    for text, changed in [
        ("D has shape (3,), expected (H,) = (4,) or (H, V) = (4, 5)", {"D": np.ones(3)}),
        ("D has shape (4, 4), expected (H,) = (4,) or (H, V) = (4, 5)", {"D": np.ones((4, 4))}),
        ("A has shape (4, 8), expected (H,) = (4,)", {"A": np.ones((H, K))}),
        ("dt has shape (2, 64, 1), expected (B, T, H) = (2, 64, 4)", {"dt": dt[:, :, :1]}),
        ("z has shape (2, 64, 4), expected (B, T, H, V) = (2, 64, 4, 5)", {"z": dt}),
        ("C has Hq = 8 heads and x H = 4, expected Hq to divide H", {"C": np.concatenate([Q, Q], 2), "D": A}),
    ]:
        refuse(ValueError, f"mamba2: {text}", la.mamba2, **{"x": x, "dt": dt, "A": A, "B": KEYS, "C": Q} | changed)
    q = Q, KEYS, VALUES
    for g in (G[0, :4, :3], G):
        refuse(
            ValueError,
            f"retention: g has shape {g.shape}, expected (H,) = (4,) or (H, K) = (4, 8)",
            la.retention,
            *q,
            g,
        )
    refuse(
        ValueError,
        "lightning_attention: slopes has shape (3,), expected (H,) = (4,)",
        la.lightning_attention,
        *q,
        np.ones(3),
    )
    refuse(ValueError, "gla: gv has shape (2, 64, 4), expected (B, T, H, V) = (2, 64, 4, 5)", la.gla, *q, Q, G)
    refuse(ValueError, "rwkv6: u has shape (8,), expected (H, K) = (4, 8)", la.rwkv6, *q, Q, np.ones(8))


# sequences


@pytest.mark.parametrize(
    ("offsets", "error", "text"),
    [
        ([1, 64], ValueError, "cu_seqlens starts at 1, expected 0"),
        ([0, 30, 20, 64], ValueError, "cu_seqlens decreases from 30 to 20 at 2, expected offsets in order"),
        ([0, 63], ValueError, "cu_seqlens ends at 63, expected T = 64"),
        ([0, 30, 65], ValueError, "cu_seqlens ends at 65, expected T = 64"),
        ([], ValueError, "cu_seqlens is [], expected at least two offsets: 0 and T = 64"),
        ([0], ValueError, "cu_seqlens is [0], expected at least two offsets: 0 and T = 64"),
        (np.array([0.0, 64.0]), TypeError, "cu_seqlens has dtype float64, expected integers"),
        (np.array([False, True]), TypeError, "cu_seqlens has dtype bool, expected integers"),
        ([0, 64.0], TypeError, "cu_seqlens is [0, 64.0], expected integers"),
        ([False, 64], TypeError, "cu_seqlens is [False, 64], expected integers"),
        ([[0, 64]], TypeError, "cu_seqlens is [[0, 64]], expected integers"),
        (64, TypeError, "cu_seqlens is 64, expected integers"),
        ("64", TypeError, "cu_seqlens is '64', expected integers"),
        (np.array([[0, 64]]), ValueError, "cu_seqlens has shape (1, 2), expected (N + 1,)"),
        (np.array(64), ValueError, "cu_seqlens has shape (), expected (N + 1,)"),
    ],
    ids=str,
)
def test_offsets(offsets, error, text):
    gated(error, text, **{n: x[:1] for n, x in GOOD.items()}, cu_seqlens=offsets)


def test_offsets_over_more_than_one_batch_row():
    gated(ValueError, "cu_seqlens needs one packed batch row, got batch axes (2,)", cu_seqlens=[0, 64])
    gated(
        ValueError,
        "state has shape (1, 4, 8, 5), expected (N, H, K, V) = (2, 4, 8, 5)",
        cu_seqlens=[0, 30, 64],
        state=STATE[:1],
        **{n: x[:1] for n, x in GOOD.items()},
    )


@pytest.mark.parametrize(
    "offsets", [[0, 30, 64], (0, 30, 64), [np.int64(0), np.int32(30), 64], np.array([0, 30, 64], np.uint8)], ids=repr
)
def test_offsets_of_any_integer_kind(offsets):
    packed = {n: x[:1] for n, x in GOOD.items()}
    np.testing.assert_array_equal(
        la.gated_delta_rule(**packed, cu_seqlens=offsets)[:, 30:],
        la.gated_delta_rule(**{n: x[:, 30:] for n, x in packed.items()}),
    )


# states


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        (STATE[:, :3], ValueError, "state has shape (2, 3, 8, 5), expected (B, H, K, V) = (2, 4, 8, 5)"),
        (STATE[0], ValueError, "state has shape (4, 8, 5), expected (B, H, K, V) = (2, 4, 8, 5)"),
        (np.zeros((B, H, V, K)), ValueError, "state has shape (2, 4, 5, 8), expected (B, H, K, V) = (2, 4, 8, 5)"),
        (STATE.astype(int), TypeError, f"state has dtype int64, {FLOATS}"),
        (
            STATE.astype("c8"),
            TypeError,
            "state has dtype complex64, expected one of float16, bfloat16, float32, float64",
        ),
        ((STATE, SUM), TypeError, "state is a tuple, expected one array (..., H, K, V)"),
        (la.NormalisedState(STATE, SUM), TypeError, "state is a NormalisedState, expected one array (..., H, K, V)"),
        ([STATE], TypeError, f"state is a list, {ARRAY}"),
        (0, TypeError, f"state is a int, {ARRAY}"),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else "",
)
def test_states(state, error, text):
    gated(error, text, state=state)


def test_the_whole_result_as_a_state():
    result = la.gated_delta_rule(**GOOD, return_state=True)
    gated(TypeError, "state is a Result, expected one array (..., H, K, V)", state=result)


NORMALISED = {"normalize": True, "feature_map": "elu+1"}


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        (STATE, TypeError, "state is a ndarray, expected (S, z) as a NormalisedState with normalize=True"),
        ((STATE, SUM, SUM), TypeError, "state is a tuple of 3, expected two arrays (S, z) as a NormalisedState"),
        ((STATE, None), TypeError, "state is a tuple of 2, expected two arrays (S, z) as a NormalisedState"),
        ((STATE, SUM[:, :2]), ValueError, "state.z has shape (2, 2, 8), expected (B, H, M) = (2, 4, 8)"),
        ((STATE[0], SUM), ValueError, "state.S has shape (4, 8, 5), expected (B, H, M, V) = (2, 4, 8, 5)"),
        ((STATE, SUM.astype(int)), TypeError, "state.z has dtype int64, expected float32 or float64"),
        ((STATE, SUM.astype("f2")), TypeError, "state.z has dtype float16, expected float32 or float64"),
        ((STATE, 1.0), TypeError, f"state.z is a float, {ARRAY}"),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else "",
)
def test_normalised_states(state, error, text):
    refuse(error, f"linear_attention: {text}", la.linear_attention, Q, KEYS, VALUES, state=state, **NORMALISED)


SEVERAL = [fn for fn in la.VARIANTS if fn.spec.state.parts is not None]


@pytest.mark.parametrize("fn", SEVERAL, ids=lambda fn: fn.__name__)
def test_parts_of_states(fn):
    """One array in the place of several, a class, and parts without axes."""
    options = fn.samples.options[0] | ({} if fn.spec.state.option is None else {fn.spec.state.option: True})
    given = la.testing.sample(fn, np.random.default_rng(0), T=2) | dict(options)
    state = la.testing.sample_state(fn, np.random.default_rng(1), (2,), options)
    with pytest.raises(
        TypeError, match=rf"^{fn.__name__}: state is a ndarray, expected \(.*\) as a {type(state).__name__}"
    ):
        fn(**given, state=state[0])
    for name, S in state._asdict().items():
        with pytest.raises(TypeError, match=rf"^{fn.__name__}: state.{name} is a type, expected an array"):
            fn(**given, state=state._replace(**{name: np.ndarray}))
        if S.ndim > 1:
            with pytest.raises(ValueError, match=rf"^{fn.__name__}: state.{name} has shape \(\), expected \(B, "):
                fn(**given, state=state._replace(**{name: np.ones((), S.dtype)}))


def test_a_plain_pair_is_a_normalised_state():
    S, z = STATE + 0.5, SUM
    call = {"return_state": True, **NORMALISED}
    expected, pull = la.vjp(la.linear_attention, Q, KEYS, VALUES, state=la.NormalisedState(S, z), **call)
    result, pullback = la.vjp(la.linear_attention, Q, KEYS, VALUES, state=(S, z), **call)
    np.testing.assert_array_equal(result.out, expected.out)
    assert isinstance(result.state, la.NormalisedState)
    for a, b in zip(pullback(result.out, (S, z)).state, pull(result.out, la.NormalisedState(S, z)).state, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(la.read(abs(Q), (S, z)), la.read(abs(Q), la.NormalisedState(S, z)))


def test_states_that_cannot_be_overwritten():
    read_only = STATE.copy()
    read_only.flags.writeable = False
    for state, error, text in [
        (None, ValueError, "overwrite_state=True without a state, expected state to be given"),
        (STATE.astype("f4"), TypeError, "state has dtype float32, expected float64 to be overwritten"),
        (read_only, ValueError, "state is read-only, expected a writeable array with overwrite_state=True"),
        (
            STATE.astype(STATE.dtype.newbyteorder()),
            TypeError,
            "state is byte-swapped, expected this machine's byte order to be overwritten",
        ),
    ]:
        with pytest.raises(error, match=sentence(f"gated_delta_rule: {text}")):
            la.gated_delta_rule(**GOOD, state=state, overwrite_state=True)
    with pytest.raises(TypeError, match=r"linear_attention: state\.z is byte-swapped"):
        la.linear_attention(
            Q, KEYS, VALUES, state=(STATE, SUM.astype(SUM.dtype.newbyteorder())), overwrite_state=True, **NORMALISED
        )
    with pytest.raises(
        ValueError,
        match=sentence(
            "gated_delta_rule: overwrite_state=True was given to vjp, expected False: the pullback needs the state "
            "that would be overwritten"
        ),
    ):
        la.vjp(la.gated_delta_rule, **GOOD, state=STATE, overwrite_state=True)


# options


KNOWN = "expected one of qk_l2norm, l2norm_eps, beta_sigmoid, allow_neg_eigval, ..., check"


@pytest.mark.parametrize(
    ("option", "error", "text"),
    [
        ({"normalize": True}, TypeError, f"unknown option 'normalize', {KNOWN}"),
        ({"initial_state": STATE}, TypeError, f"unknown option 'initial_state' (did you mean state?), {KNOWN}"),
        ({"chunk_size": 0}, ValueError, "chunk_size is 0, expected None, 'parallel' or a whole number from 1"),
        ({"chunk_size": -16}, ValueError, "chunk_size is -16, expected None, 'parallel' or a whole number from 1"),
        ({"chunk_size": 2.0}, ValueError, "chunk_size is 2.0, expected None, 'parallel' or a whole number from 1"),
        ({"chunk_size": True}, ValueError, "chunk_size is True, expected None, 'parallel' or a whole number from 1"),
        ({"chunk_size": "all"}, ValueError, "chunk_size is 'all', expected None, 'parallel' or a whole number from 1"),
        ({"layout": "BHTD"}, ValueError, "layout is 'BHTD', expected 'time_first' or 'heads_first'"),
        ({"backend": "cpu"}, ValueError, "backend is 'cpu' (did you mean 'numba'?), expected None or ..."),
        ({"backend": "cuda"}, ValueError, "backend 'cuda' does not cover this call: ..."),
        (
            {"backend": "reference", "chunk_size": "parallel"},
            ValueError,
            "backend 'reference' does not cover this call: the definition goes token by token; ...",
        ),
        ({"scale": "a"}, TypeError, "scale is 'a', expected None or a real number"),
        ({"scale": True}, TypeError, "scale is True, expected None or a real number"),
        ({"scale": 1j}, TypeError, "scale is 1j, expected None or a real number"),
        ({"scale": np.array(1.0)}, TypeError, "scale is array(1.), expected None or a real number"),
        ({"return_state": 1}, TypeError, "return_state is 1, expected True or False"),
        ({"overwrite_state": None}, TypeError, "overwrite_state is None, expected True or False"),
    ],
    ids=str,
)
def test_options(option, error, text):
    gated(error, text, **option)


def test_options_of_their_own():
    q = Q, KEYS, VALUES
    maps = (
        f"expected one of {', '.join(map(repr, la.feature_maps.FEATURE_MAPS))}, a pair (f, f_vjp) of functions, "
        "or two of those for q and k"
    )
    short = (lambda x: x[..., :3], lambda x, d: d)
    for option, error, text in [
        ({"feature_map": "elu"}, ValueError, f"feature_map is 'elu', {maps}"),
        ({"feature_map": ("relu", "elu")}, ValueError, f"feature_map is 'elu', {maps}"),
        ({"feature_map": None}, ValueError, f"feature_map is None, {maps}"),
        ({"feature_map": np.exp}, ValueError, f"feature_map is <ufunc 'exp'>, {maps}"),
        ({"feature_map": ("identity", short)}, ValueError, "feature_map makes q 8 and k 3 wide, expected one width"),
        (
            {"feature_map": (lambda x: x.sum(-1), np.add)},
            ValueError,
            "feature_map makes k of shape (2, 64, 4, 8) one of (2, 64, 4), expected all axes but the last to stay",
        ),
        ({"eps": "x"}, ValueError, "eps is 'x', expected a finite number >= 0"),
        ({"causal": 0}, TypeError, "causal is 0, expected True or False"),
        ({"normalize": None}, TypeError, "normalize is None, expected True or False"),
    ]:
        refuse(error, f"linear_attention: {text}", la.linear_attention, *q, **option)
    whole = "expected a whole number from"
    for fn, option, error, text in [
        (la.performer, {"num_features": 0}, ValueError, f"num_features is 0, {whole} 1"),
        (
            la.performer,
            {"num_features": 7, "hyperbolic": True},
            ValueError,
            "num_features is 7, expected an even number with hyperbolic=True",
        ),
        (la.performer, {"seed": -1}, ValueError, f"seed is -1, {whole} 0"),
        (la.performer, {"hyperbolic": 1}, TypeError, "hyperbolic is 1, expected True or False"),
        (la.based, {"order": 2.0}, ValueError, f"order is 2.0, {whole} 1"),
        (la.rfa, {"num_features": True}, ValueError, f"num_features is True, {whole} 1"),
        (la.rfa, {"sigma": 0}, ValueError, "sigma is 0, expected a number above 0"),
        (la.rebased, {"eps": -1}, ValueError, "eps is -1, expected a finite number >= 0"),
    ]:
        refuse(error, f"{fn.__name__}: {text}", fn, *q, **option)
    layer = "expected 0 <= layer < num_layers"
    for option, text in [
        ({"layer": 3, "num_layers": 2}, f"layer is 3 of num_layers 2, {layer}"),
        ({"layer": -1}, f"layer is -1 of num_layers 1, {layer}"),
        ({"layer": 0.5}, f"layer is 0.5 of num_layers 1, {layer}"),
        ({"slopes": "alibi"}, "slopes is 'alibi', expected an array (H,), None or one of 'lightning', ..., 'fla'"),
    ]:
        refuse(ValueError, f"lightning_attention: {text}", la.lightning_attention, *q, **option)
    m = {"x": VALUES, "dt": np.ones((B, T, H)), "A": -np.ones(H), "B": KEYS, "C": Q}
    for limit in (3, (2, 1), ("a", 1), (float("nan"), 1), (1, 2, 3)):
        refuse(
            ValueError,
            f"mamba2: dt_limit is {limit!r}, expected (low, high) with low <= high",
            la.mamba2,
            **m,
            dt_limit=limit,
        )
    refuse(TypeError, "mamba2: dt_softplus is 1, expected True or False", la.mamba2, **m, dt_softplus=1)


PIECES = [la.merge, *(getattr(la.nn, name) for name in la.nn.__all__)]
NOT_TRUE = (1, None, np.True_, "yes", np.array([True, False]))


@pytest.mark.parametrize("fn", [*la.VARIANTS, *PIECES], ids=lambda fn: fn.__name__)
def test_truth_values(fn):
    """Of every option that is True or False by default."""
    spec = getattr(fn, "spec", None)
    arrays = la.testing.sample(fn, np.random.default_rng(0), T=2) if spec else arrays_of_piece(fn.__name__)
    defaults = {n: p.default for n, p in inspect.signature(fn).parameters.items() if isinstance(p.default, bool)}
    for name, wrong in itertools.product(defaults, NOT_TRUE):
        with pytest.raises(TypeError, match=rf"^{fn.__name__}: {name} is .*, expected True or False$"):
            fn(**arrays | {name: wrong})


def arrays_of_piece(name):
    """The arguments of a call of a piece in the table of its tests."""
    if name == "merge":
        return {"out1": VALUES, "lse1": G, "out2": VALUES, "lse2": BETA}
    case = next(case for case in SMALL if case.name == name)
    return case.arrays | dict(case.whole) | dict(case.options)


@pytest.mark.parametrize("name", [fn.__name__ for fn in PIECES])
def test_a_backend_is_a_word(name):
    """An array is not compared."""
    with pytest.raises(ValueError, match=rf"^{name}: backend is array"):
        getattr(la.nn, name)(**arrays_of_piece(name) | {"backend": np.array([1, 2])})


# which arrays


def test_too_many_too_few_twice():
    arrays, given = list(GOOD.values()), "expected the arrays q, k, v, g, beta"
    refuse(
        TypeError,
        "gated_delta_rule: 8 arrays were given by position, expected at most 7: q, k, v, g, beta, A_log, "
        "dt_bias; options go by keyword",
        la.gated_delta_rule,
        *arrays,
        None,
        None,
        0.5,
    )
    refuse(TypeError, f"gated_delta_rule: A_log is a float, {ARRAY}", la.gated_delta_rule, *arrays, 0.5)
    refuse(TypeError, f"gated_delta_rule: beta is missing, {given}", la.gated_delta_rule, *arrays[:4])
    refuse(TypeError, f"gated_delta_rule: k is missing, {given}", la.gated_delta_rule)
    gated(TypeError, f"g is missing, {given}", g=None)
    gated(TypeError, f"v is missing, {given}", v=None)
    refuse(
        TypeError,
        "gated_delta_rule: beta was given twice, by position and by keyword",
        la.gated_delta_rule,
        *arrays,
        beta=BETA,
    )


def test_lists_and_numbers():
    for name, wrong, kind in [("q", Q.tolist(), "list"), ("beta", 1.0, "float"), ("g", "no", "str")]:
        gated(TypeError, f"{name} is a {kind}, {ARRAY}", **{name: wrong})


class Frame:
    """A table that NumPy converts."""

    def __array__(self, dtype=None, copy=None):
        return Q


def test_what_numpy_converts_is_not_converted_silently():
    with pytest.raises(TypeError, match=r"^gated_delta_rule: q is a Frame, .*: numpy\.asarray\(q\) makes one$"):
        la.gated_delta_rule(**GOOD | {"q": Frame()})


def test_decays_of_another_function():
    """One log decay a head where each key channel has one, and the other way round."""
    one, many = -np.ones((B, T, H)), -np.ones((B, T, H, K))
    for fn, g, text in (
        (la.gla, one, "a head is for la.simple_gla"),
        (la.simple_gla, many, "a key channel is for la.gla"),
        (la.kda, one, "a head is for la.gated_delta_rule"),
        (la.gated_delta_rule, many, "a key channel is for la.kda"),
    ):
        arrays = (Q, Q, VALUES, g, BETA) if "beta" in fn.spec.arrays else (Q, Q, VALUES, g)
        with pytest.raises(ValueError, match=f"^{fn.__name__}: g has shape .*: one log decay {text}$"):
            fn(*arrays)


# pullbacks


def test_cotangents():
    _, pullback = la.vjp(la.gated_delta_rule, **GOOD, state=STATE, return_state=True)
    dout = np.ones((B, T, H, V))
    for cotangents, error, text in [
        ((), TypeError, "the pullback got neither dout nor dstate, expected at least one"),
        ((dout[:, :3],), ValueError, "dout has shape (2, 3, 4, 5), expected (2, 64, 4, 5)"),
        ((dout.astype(int),), TypeError, f"dout has dtype int64, {FLOATS}"),
        ((dout.tolist(),), TypeError, f"dout is a list, {ARRAY}"),
        ((1.0,), TypeError, f"dout is a float, {ARRAY}"),
        ((dout, STATE[0]), ValueError, "dstate has shape (4, 8, 5), expected (2, 4, 8, 5)"),
        ((dout, STATE > 0), TypeError, f"dstate has dtype bool, {FLOATS}"),
        ((dout, (STATE, SUM)), TypeError, "dstate is a tuple, expected one array (..., H, K, V)"),
    ]:
        with pytest.raises(error, match=sentence(f"gated_delta_rule: {text}")):
            pullback(*cotangents)
    _, pullback = la.vjp(la.gated_delta_rule, **GOOD | {"q": None})
    with pytest.raises(
        ValueError, match=sentence("gated_delta_rule: dout has shape (2, 64, 4, 5), expected None: there is no out")
    ):
        pullback(dout)
    transposed = {n: np.moveaxis(x, 1, 2) for n, x in GOOD.items()}
    _, pullback = la.vjp(la.gated_delta_rule, **transposed, layout="heads_first")
    with pytest.raises(
        ValueError, match=sentence("gated_delta_rule: dout has shape (2, 64, 4, 5), expected (2, 4, 64, 5)")
    ):
        pullback(dout)


def test_cotangents_of_normalised_states():
    (out, _), pullback = la.vjp(la.linear_attention, Q, KEYS, VALUES, return_state=True, **NORMALISED)
    for dstate, error, text in [
        (STATE, TypeError, "dstate is a ndarray, expected (dS, dz) as a NormalisedState"),
        ((STATE, SUM[0]), ValueError, "dstate.z has shape (4, 8), expected (2, 4, 8)"),
        ((STATE, None), TypeError, "dstate is a tuple of 2, expected two arrays (S, z) as a NormalisedState"),
    ]:
        with pytest.raises(error, match=sentence(f"linear_attention: {text}")):
            pullback(out, dstate)


def test_parts_of_cotangents_are_not_other_cotangents():
    """Neither in the first call, nor when the pullback is replayed."""
    for _ in range(3):
        (out, state), pullback = la.vjp(la.linear_attention, Q, KEYS, VALUES, return_state=True, **NORMALISED)
        pullback(out, state)
        with pytest.raises(TypeError, match=sentence("linear_attention: dout is a tuple, expected an array...")):
            pullback((out, *state[:1]), state[1])


# read, and functions of functions


def test_read():
    for arrays, options, error, text in [
        ((Q, STATE[0, 0]), {}, ValueError, "state has shape (8, 5), expected (..., H, K, V)"),
        ((Q[..., :3], STATE), {}, ValueError, "q has shape (2, 64, 4, 3), expected (B, T, Hq, K) = (2, T, Hq, 8)"),
        (
            (Q[:, :, :3], STATE),
            {},
            ValueError,
            "queries have Hq = 3 heads and values H = 4, expected one to divide the other",
        ),
        ((None, STATE), {}, TypeError, "q is None, expected an array"),
        ((Q, None), {}, TypeError, "state is None, expected an array"),
        ((Q, STATE.astype(int)), {}, TypeError, f"state has dtype int64, {FLOATS}"),
        ((Q, (STATE, SUM[0])), {}, ValueError, "state.z has shape (4, 8), expected (B, H, K) = (2, 4, 8)"),
        (
            (Q, (STATE,)),
            {},
            TypeError,
            "state is a tuple of 1, expected an array or two arrays (S, z) as a NormalisedState",
        ),
        ((Q, STATE), {"scale": "a"}, TypeError, "scale is 'a', expected None or a real number"),
        ((Q, STATE), {"layout": 3}, ValueError, "layout is 3, expected 'time_first' or 'heads_first'"),
    ]:
        refuse(error, f"read: {text}", la.read, *arrays, **options)
    with pytest.raises(TypeError, match=sentence("read: unknown option 'causal', expected one of scale, layout")):
        la.vjp(la.read, Q, STATE, causal=True)
    _, pullback = la.vjp(la.read, Q, STATE)
    with pytest.raises(ValueError, match=sentence("read: dout has shape (2, 64, 4, 8), expected (2, 64, 4, 5)")):
        pullback(Q)
    with pytest.raises(TypeError, match=sentence("read: dout is None, expected an array")):
        pullback(None)


def test_functions_of_other_functions():
    with pytest.raises(TypeError, match=sentence("vjp: fn is 'sum', expected a function of linattn_np")):
        la.vjp(np.sum, Q)
    with pytest.raises(TypeError, match=sentence("vjp: fn is 'kda', expected a function of linattn_np")):
        la.vjp("kda", Q)
    for fn, what in ((la.vjp, "function"), (la.explain, "variant"), (la.check, "variant"), (la.step, "variant")):
        with pytest.raises(TypeError, match=rf"^{fn.__name__}: fn is array\(.*\(ndarray\), expected a {what}") as wrong:
            fn(np.random.default_rng(0).standard_normal((20, 20)))  # a result in the place of the function
        assert len(str(wrong.value)) < 200
    for fn in (la.influence_matrix, la.explain):
        with pytest.raises(TypeError, match=sentence(f"{fn.__name__}: fn is 'read', expected a variant of linattn_np")):
            fn(la.read, Q, STATE)
    for option in ({"state": STATE}, {"return_state": True}):
        name = next(iter(option))
        with pytest.raises(
            ValueError,
            match=sentence(f"influence_matrix: {name} is given, expected none: A is of a call that starts from zero"),
        ):
            la.influence_matrix(la.gated_delta_rule, **GOOD, **option)
    with pytest.raises(
        TypeError, match=sentence("influence_matrix: q is None, expected an array: A is what the queries read")
    ):
        la.influence_matrix(la.gated_delta_rule, **GOOD | {"q": None})


# odd but right


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.spec.name)
def test_complex_cotangents_of_real_results_are_errors(fn):
    rng = np.random.default_rng(0)
    arrays = la.testing.sample(fn, rng, B=(1,), T=3, H=1, K=2, V=2)
    result, pullback = la.vjp(fn, **arrays, return_state=True)
    if result.out.dtype.kind == "f":
        with pytest.raises(TypeError, match=f"^{fn.spec.name}: dout has dtype complex128, expected one of float16"):
            pullback(result.out + 1j)
    if isinstance(result.state, np.ndarray) and result.state.dtype.kind == "f":
        with pytest.raises(TypeError, match=f"^{fn.spec.name}: dstate has dtype complex128, expected one of float16"):
            pullback(None, result.state + 1j)


@functools.cache
def covering(fn):
    """The backends that cover a variant's call on NumPy arrays."""
    arrays, found = la.testing.sample(fn, np.random.default_rng(0)), []
    for name in fn.spec.core.BACKENDS:
        with contextlib.suppress(ValueError):
            la.explain(fn, **arrays, backend=name)
            found.append(name)
    return found


EMPTY = [{"H": 0}, {"K": 0}, {"V": 0}, {"B": (0,)}]


@pytest.mark.parametrize("sizes", [{"T": 0}, *({"T": T} | one for T in (0, 1, 6, 70) for one in EMPTY)], ids=str)
def test_empty_axes_are_no_error(sizes, monkeypatch):
    make = np.empty

    def with_nan(shape, dtype=float, **options):  # a result that no kernel writes is NaN, whatever the memory held
        y = make(shape, dtype, **options)
        if y.dtype.kind in "fc":
            y.fill(np.nan)
        return y

    monkeypatch.setattr(np, "empty", with_nan)
    for fn in la.VARIANTS:
        arrays = la.testing.sample(fn, np.random.default_rng(0), **{"K": 3, "V": 2, **sizes})
        for backend in covering(fn):
            result, pullback = la.vjp(fn, **arrays, return_state=True, backend=backend)
            assert result.out.shape[-1] == arrays[fn.spec.change.value].shape[-1]
            for name, d in pullback(result.out, result.state)._asdict().items():
                assert d is None or (d.shape == arrays[name].shape and np.isfinite(d).all())
