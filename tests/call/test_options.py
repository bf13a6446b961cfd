"""Every option with values of every kind: accepted, or refused by an error that names function and option."""

from __future__ import annotations

import decimal
import fractions
import re

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.options import COMMON
from tests.cases import RECURRENCES, has_decay, one_per

VALUES = {
    "None": None, "nan": float("nan"), "inf": float("inf"), "-inf": -float("inf"), "10**400": 10**400,
    "10**5000": 10**5000, "Decimal": decimal.Decimal("1.5"), "Fraction": fractions.Fraction(1, 2),
    "0-d array": np.array(1.0), "array": np.array([1, 2]), "word array": np.array("time_first"),
    "word arrays": np.array(["chunks", "tf32"]), "None array": np.array(None), "str_": np.str_("x"), "list": ["a"],
    "empty list": [], "tuple": (1, 2), "dict": {"a": 1}, "object": object(), "True": True, "False": False,
    "numpy bool": np.True_, "bytes": b"x", "complex": 1j, "function": len, "type": float, "range": range(2),
    "masked": np.ma.array([0, 1], mask=[0, 1]), "-1": -1, "0": 0, "2.5": 2.5, "int64": np.int64(3),
}  # fmt: skip
OPTIONS = [(fn, name) for fn in one_per(lambda spec: tuple(spec.options) or None) for name in fn.spec.options]
OPTIONS += [
    (fn, name) for name in COMMON for fn in one_per(lambda spec: spec.erase if spec.state.parts is None else None)
]


def refused(fn, name, value, **more):
    """The error of a call that does not go through."""
    arrays = la.testing.sample(fn, np.random.default_rng(0), B=(1,), T=2, H=1, K=4, V=4, optional=False)
    try:
        with np.errstate(all="ignore"):
            fn(**arrays, **more, **{name: value})
    except Exception as error:
        return error
    return None


def assert_clear(error, fn, name):
    assert type(error) in (TypeError, ValueError)
    assert re.match(rf"{fn}: (.* )?{name}[ =]", str(error), re.DOTALL), error
    assert "expected" in str(error)
    assert len(str(error)) < 600


@pytest.mark.parametrize(("fn", "name"), OPTIONS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_value_of_any_kind_goes_through_or_is_refused_clearly(fn, name):
    shown = {"rule": "slopes", "num_layers": "layer"}.get(name, name)
    for value in VALUES.values():
        if (error := refused(fn, name, value)) is not None:
            assert_clear(error, fn.__name__, shown)
    assert refused(fn, name, VALUES["object"]) is not None


@pytest.mark.parametrize("name", ["state_rows", "cu_seqlens", "overwrite_state"])
def test_options_beside_a_state(name):
    for value in VALUES.values():
        error = refused(la.gated_delta_rule, name, value, state=np.zeros((1, 1, 4, 4)))
        if error is not None:
            assert_clear(error, "gated_delta_rule", name)


@pytest.mark.parametrize("name", ["scale", "layout"])
def test_options_of_read(name):
    for value in VALUES.values():
        try:
            with np.errstate(all="ignore"):
                la.read(np.ones((1, 2, 1, 4)), np.ones((1, 1, 4, 4)), **{name: value})
        except Exception as error:
            assert_clear(error, "read", name)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "10**400", "10**5000"])
def test_a_scale_is_a_finite_number(value):
    assert str(refused(la.kda, "scale", VALUES[value])).endswith("expected None or a finite number")


def test_words_of_numpy_are_words():
    for name, word in (("layout", "time_first"), ("chunk_size", "parallel"), ("backend", "chunks")):
        assert refused(la.kda, name, np.str_(word)) is None
        assert refused(la.kda, name, np.array(word)) is not None


def test_numbers_of_numpy_are_numbers():
    assert refused(la.performer, "num_features", np.int64(4)) is None
    assert refused(la.based, "order", np.int32(2)) is None
    assert refused(la.mlstm, "soft_cap", fractions.Fraction(3, 2)) is None


Q = np.random.default_rng(0).standard_normal((1, 3, 2, 4))


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda x: x.tolist(), "feature_map makes k a list, expected an array"),
        (lambda x: None, "feature_map makes k a NoneType, expected an array"),
        (lambda x: x > 0, "feature_map makes k of dtype bool, expected one of float16"),
        (lambda x: x.astype(int), "feature_map makes k of dtype int64, expected one of float16"),
    ],
)
def test_results_of_a_map_are_checked(f, text):
    for state in (None, np.zeros((1, 2, 4, 4))):
        with pytest.raises(TypeError, match=f"^linear_attention: {text}"):
            la.linear_attention(Q, Q, Q, feature_map=(f, f), state=state)


@pytest.mark.parametrize(
    ("f_vjp", "error", "text"),
    [
        (
            lambda x, d: d[..., :2],
            ValueError,
            r"f_vjp of feature_map makes dk of shape \(1, 3, 2, 2\), expected \(1, 3, 2, 4\), the shape of k",
        ),
        (lambda x, d: d.sum(), ValueError, r"f_vjp of feature_map makes dk of shape \(\), expected \(1, 3, 2, 4\)"),
        (lambda x, d: d.tolist(), TypeError, "f_vjp of feature_map makes dk a list, expected an array"),
    ],
)
def test_results_of_the_transpose_of_a_map_are_checked(f_vjp, error, text):
    out, pullback = la.vjp(la.linear_attention, Q, Q, Q, feature_map=(lambda x: x, f_vjp))
    with pytest.raises(error, match=f"^linear_attention: {text}"):
        pullback(out)


BY_ERASE = one_per(lambda spec: spec.erase, filter(has_decay, RECURRENCES))


@pytest.mark.parametrize("fn", BY_ERASE, ids=lambda fn: fn.__name__)
def test_chunk_states_chooses_how_array_calls_carry_the_state(fn, monkeypatch):
    from linattn_np.matrix_state.array import running, scan

    x = la.testing.sample(fn, np.random.default_rng(0), B=(2,), T=70, H=2, K=5, V=3, optional=False)
    options = {"backend": "chunks", "chunk_size": 16, "return_state": True}
    expected, back = la.vjp(fn, **x, **options, chunk_states="loop")
    plain = la.vjp(fn, **x, **options)[0]
    assert np.array_equal(plain[0], expected[0])
    calls: list[object] = []
    for module in (running, scan):
        own = module.forward
        monkeypatch.setattr(module, "forward", lambda *a, m=module, f=own: calls.append(m) or f(*a))
    for _ in range(2):
        found, pullback = la.vjp(fn, **x, **options, chunk_states="scan")
        assert scan in calls
        for a, b in zip((*found, *pullback(*expected)), (*expected, *back(*expected)), strict=True):
            assert a is b is None or la.testing.relative_error(a, b) < 1e-11


def test_chunk_states_is_checked():
    x = np.ones((1, 3, 2, 4))
    with pytest.raises(ValueError, match="gla: chunk_states is 'tree', expected None, 'loop' or 'scan'"):
        la.gla(x, x, x, -x, chunk_states="tree")


LARGE = (la.atlas, la.lact, la.titans, la.ttt_mlp)  # models of several matrices, whose products are array calls


@pytest.mark.parametrize("fn", [fn for fn in la.VARIANTS if fn not in LARGE], ids=lambda fn: fn.spec.name)
def test_explain_says_that_a_call_is_slow_and_what_is_fast(fn):
    """NumPy calls with default options take compiled loops; others say so, and their remedy is one."""
    pytest.importorskip("numba")
    x = la.testing.sample(fn, np.random.default_rng(0), T=40, K=16, V=16)
    for own in fn.samples.options or ({},):
        own = {n: y for n, y in own.items() if n != "chunk_size"}
        assert la.explain(fn, **x, **own).slow == ""
        for more in ({"backend": "chunks"}, {"chunk_size": 300}):
            explained = la.explain(fn, **x, **own | more)
            assert explained.slow.endswith(f"; fast without {next(iter(more))}") or explained.backend == "numba", (
                explained
            )
            assert (f"  slow path: {explained.slow}" in str(explained).split("\n")) == bool(explained.slow)
