"""ONNX's operator CausalConvWithState: the standard's cases, its reference implementation, and errors."""

from __future__ import annotations

import importlib

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("onnx.reference.ops.op_causal_conv_with_state", reason="no onnx with the operator is installed")

import onnx
from onnx.backend.test.case import node
from onnx.reference import ReferenceEvaluator

from linattn_np.bridges.onnx import OPSET, CausalConvWithState, causal_conv_with_state
from linattn_np.testing import relative_error

importlib.import_module("onnx.backend.test.case.node.causal_conv_with_state")  # adds its cases
CASES = [case for case in node._NodeTestCases if "causal_conv_with_state" in case.name and "expanded" not in case.name]
B, C = 2, 3
BOUND = {"float32": 1e-6, "float16": 2.0**-9, "bfloat16": 2.0**-6}  # two roundings of the reference


def model_of(given, activation):
    kind = onnx.helper.np_dtype_to_tensor_dtype(given["input"].dtype)
    names = [name if x is not None else "" for name, x in given.items()]
    attributes = {} if activation is None else {"activation": activation}
    one = onnx.helper.make_node("CausalConvWithState", names, ["output", "present_state"], **attributes)
    info = [onnx.helper.make_tensor_value_info(n, kind, x.shape) for n, x in given.items() if x is not None]
    ends = [onnx.helper.make_tensor_value_info(n, kind, None) for n in ("output", "present_state")]
    graph = onnx.helper.make_graph([one], "convolution", info, ends)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)])


def draw(T, k, bias=True, past=True, dtype=np.float32):
    rng = np.random.default_rng(T)
    shapes = {"input": (B, C, T), "weight": (C, 1, k), "bias": (C,), "past_state": (B, C, k - 1)}
    given = {n: rng.standard_normal(shape).astype(dtype) for n, shape in shapes.items()}
    return given | ({} if bias else {"bias": None}) | ({} if past else {"past_state": None})


def agree(found, expected, dtype):
    for x, y in zip(found, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert relative_error(x.astype(np.float64), y.astype(np.float64)) <= BOUND[np.dtype(dtype).name]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removeprefix("test_causal_conv_with_state_"))
def test_the_cases_of_the_standard(case):
    names = [x.name for x in case.model.graph.input]
    for inputs, outputs in case.data_sets:
        given = dict(zip(names, inputs, strict=True))
        agree(ReferenceEvaluator(case.model, new_ops=[CausalConvWithState]).run(None, given), outputs, inputs[0].dtype)


def test_there_are_cases():
    assert len(CASES) >= 5


@pytest.mark.parametrize("activation", [None, "none", "silu", "swish"])
@pytest.mark.parametrize(("bias", "past"), [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize(("T", "k"), [(1, 4), (2, 4), (3, 4), (9, 4), (5, 1), (1, 2)])
def test_it_is_the_reference(T, k, bias, past, activation):
    """One token, fewer than k - 1 of them, no past state; by the evaluator and as a function."""
    given = draw(T, k, bias, past)
    model, inputs = model_of(given, activation), {n: x for n, x in given.items() if x is not None}
    expected = ReferenceEvaluator(model).run(None, inputs)
    agree(ReferenceEvaluator(model, new_ops=[CausalConvWithState]).run(None, inputs), expected, np.float32)
    agree(causal_conv_with_state(**given, activation=activation or "none"), expected, np.float32)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bits_are_rounded_once(dtype):
    given = draw(9, 4, dtype=dtype)
    wide = causal_conv_with_state(**{n: x.astype(np.float32) for n, x in given.items()}, activation="silu")
    found = causal_conv_with_state(**given, activation="silu")
    for x, y in zip(found, wide, strict=True):
        assert x.dtype == dtype
        assert np.array_equal(x, y.astype(dtype))


def test_a_state_handed_over():
    given = draw(9, 4)
    whole, end = causal_conv_with_state(**given)
    x, state, outs = given.pop("input"), given.pop("past_state"), []
    for a, b in ((0, 1), (1, 1), (1, 3), (3, 9)):
        out, state = causal_conv_with_state(x[..., a:b], **given, past_state=state)
        outs.append(out)
    assert np.array_equal(np.concatenate(outs, axis=-1), whole)
    assert np.array_equal(state, end)


@pytest.mark.parametrize(("changed", "text"), [
    ({"activation": "gelu"}, "activation is 'gelu', expected one of none, silu, swish"),
    ({"weight": np.ones((C, 2, 4), np.float32)}, "weight has shape (3, 2, 4), expected (C, 1, k) = (3, 1, k)"),
    ({"weight": np.ones((C, 1, 0), np.float32)}, "k of weight is 0, expected a whole number from 1"),
    ({"input": np.ones((B, C), np.float32)}, "input has shape (2, 3), expected (B, C, T)"),
    ({"bias": np.ones(4, np.float32)}, "bias has shape (4,), expected (C,) = (3,)"),
    ({"past_state": np.ones((B, C, 4), np.float32)}, "past_state has shape (2, 3, 4), expected (B, C, k-1) = (2, 3, "),
    ({"bias": np.ones(C)}, "bias has dtype float64, expected that of input: float32"),
])  # fmt: skip
def test_wrong_arrays_are_refused(changed, text):
    with pytest.raises((TypeError, ValueError)) as error:
        causal_conv_with_state(**draw(5, 4) | changed)
    assert str(error.value).startswith(f"CausalConvWithState: {text}")
