"""Conformance cases of ONNX's operators: this library, the standard's reference and onnxruntime agree with them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx.reference.ops.op_linear_attention", reason="no onnx with LinearAttention is installed")

import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from linattn_np.bridges.onnx import CausalConvWithState, LinearAttention
from linattn_np.bridges.onnx_cases import RELATIVE, cases, write
from linattn_np.testing import relative_error

CASES = list(cases())
OURS = [LinearAttention, CausalConvWithState]


def agree(found, case):
    for x, y in zip(found, case.outputs.values(), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert relative_error(x, y) < RELATIVE


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("operators", [OURS, []], ids=["ours", "reference"])
def test_the_cases_are_computed(case, operators):
    onnx.checker.check_model(case.model, full_check=True)
    agree(ReferenceEvaluator(case.model, new_ops=operators).run(None, case.inputs), case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_onnxruntime_computes_the_cases(case):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(case.model.SerializeToString(), providers=["CPUExecutionProvider"])
    agree(session.run(None, case.inputs), case)


def test_written_cases_are_read(tmp_path):
    assert write(tmp_path) == len(CASES) == len({case.name for case in CASES})
    for case in CASES:
        data = tmp_path / case.name / "test_data_set_0"
        assert onnx.load(tmp_path / case.name / "model.onnx") == case.model
        for kind, arrays in (("input", case.inputs), ("output", case.outputs)):
            for n, (name, x) in enumerate(arrays.items()):
                tensor = onnx.TensorProto.FromString((data / f"{kind}_{n}.pb").read_bytes())
                assert tensor.name == name
                assert np.array_equal(numpy_helper.to_array(tensor), x)
