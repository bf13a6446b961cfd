"""ONNX's operator LinearAttention: the standard's cases, its reference implementation, and errors."""

from __future__ import annotations

import importlib
import itertools

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("onnx.reference.ops.op_linear_attention", reason="no onnx with LinearAttention is installed")

from onnx.backend.test.case import node
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops import op_linear_attention as standard

from linattn_np.bridges.onnx import NEEDS, OPSET, LinearAttention, linear_attention
from linattn_np.testing import relative_error

importlib.import_module("onnx.backend.test.case.node.linear_attention")  # adds its cases
CASES = [case for case in node._NodeTestCases if "linear_attention" in case.name and "expanded" not in case.name]
B, T, K, V = 2, 70, 6, 4
BOUND = {"float32": 2e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # of the last rounding


def draw(rule, Hq=4, H=2, by_channel=True, shared_beta=False, past=True, dtype=np.float32, state=None, T=T):
    """(inputs by name, attributes)."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, T, n)) for n in (Hq * K, H * K, H * V))
    k = (k.reshape(B, T, H, K) / np.linalg.norm(k.reshape(B, T, H, K), axis=-1, keepdims=True)).reshape(k.shape)
    x = {"query": q, "key": k, "value": v}
    if "decay" in NEEDS[rule]:
        x["decay"] = -rng.uniform(0, 0.2, (B, T, H * K if by_channel else H))
    if "beta" in NEEDS[rule]:
        x["beta"] = rng.uniform(0, 1, (B, T, 1 if shared_beta else H))
    x = {n: y.astype(dtype) for n, y in x.items()}
    if past:
        x["past_state"] = rng.standard_normal((B, H, K, V)).astype(state or dtype)
    return x, {"q_num_heads": Hq, "kv_num_heads": H, "update_rule": rule}


def reference(x, **attributes):
    operator = standard.LinearAttention.__new__(standard.LinearAttention)
    return operator._run(**x, **attributes)


def agree(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert relative_error(a.astype(np.float64), b.astype(np.float64)) <= BOUND[b.dtype.name]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removeprefix("test_linear_attention_"))
def test_the_cases_of_the_standard(case):
    names = [x.name for x in case.model.graph.input]
    assert case.model.opset_import[0].version == OPSET
    for inputs, outputs in case.data_sets:
        given = dict(zip(names, inputs, strict=True))
        agree(ReferenceEvaluator(case.model, new_ops=[LinearAttention]).run(None, given), outputs)


def test_there_are_cases():
    assert len(CASES) >= 14


@pytest.mark.parametrize(("by_channel", "past"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("rule", NEEDS)
def test_it_is_the_reference(rule, heads, by_channel, past):
    x, attributes = draw(rule, *heads, by_channel, shared_beta=not by_channel, past=past)
    for more in ({}, {"chunk_size": 16}, {"scale": 0.3}):
        agree(linear_attention(**x, **attributes, **more), reference(x, **attributes, **more))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("state", [None, np.float32])
def test_sixteen_bits(dtype, state):
    """The state's dtype is its own; without a past state it is that of the query."""
    x, attributes = draw("gated_delta", dtype=dtype, state=state)
    agree(linear_attention(**x, **attributes), reference(x, **attributes))
    x.pop("past_state")
    agree(linear_attention(**x, **attributes), reference(x, **attributes))


@pytest.mark.parametrize("rule", NEEDS)
def test_a_state_handed_over(rule):
    x, attributes = draw(rule)
    whole, end = linear_attention(**x, **attributes)
    state, outs = x.pop("past_state"), []
    for a, b in itertools.pairwise((0, 40, 41, T)):
        out, state = linear_attention(**{n: y[:, a:b] for n, y in x.items()}, past_state=state, **attributes)
        outs.append(out)
    assert relative_error(np.concatenate(outs, axis=1), whole) <= BOUND["float32"]
    assert relative_error(state, end) <= BOUND["float32"]


def test_no_tokens():
    x, attributes = draw("gated_delta", T=0)
    agree(linear_attention(**x, **attributes), reference(x, **attributes))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"update_rule": "additive"}, "update_rule is 'additive', expected one of linear, gated, delta, gated_delta"),
        ({"q_num_heads": 3}, "q_num_heads is 3 and kv_num_heads 2, expected numbers from 1, the second a divisor"),
        ({"kv_num_heads": None}, "q_num_heads is 4 and kv_num_heads None, expected numbers from 1"),
        ({"decay": None}, "decay is None with update_rule 'gated_delta', expected it to be given"),
        ({"update_rule": "gated"}, "beta is given with update_rule 'gated', expected None"),
        ({"beta": np.ones((B, T, 3))}, "beta has shape (2, 70, 3), expected a last axis of 2 or 1"),
        ({"decay": np.ones((B, T, 5))}, "decay has shape (2, 70, 5), expected a last axis of 2 or 12"),
        ({"key": np.ones((B, T, 10))}, "key has shape (2, 70, 10), expected 2 heads of one width K = 6"),
        ({"query": np.ones((B, T, 25))}, "query has shape (2, 70, 25), expected 4 heads of one width"),
        ({"value": np.ones((B, 3, 8))}, "value has shape (2, 3, 8), expected (B, T) = (2, 70) as in query"),
        ({"value": np.ones((T, 8))}, "value has shape (70, 8), expected three axes (B, T, heads width)"),
        (
            {"past_state": np.ones((B, 4, K, V))},
            "past_state has shape (2, 4, 6, 4), expected (B, H, K, V) = (2, 2, 6, 4)",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_the_standard_excludes_is_an_error(changed, text):
    x, attributes = draw("gated_delta")
    with pytest.raises(ValueError) as error:
        linear_attention(**{**x, **attributes, **changed})
    assert str(error.value).startswith(f"LinearAttention: {text}")
