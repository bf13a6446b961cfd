"""onnxruntime's operator com.microsoft.LinearAttention on a CPU, forward, where it is installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import numpy as np

Call = Callable[[], np.ndarray]
INPUTS = ("query", "key", "value", "past_state", "decay", "beta")


def calls(rule: str, arrays: dict[str, np.ndarray], state: np.ndarray | None = None) -> dict[str, Call]:
    """{"onnxruntime": outputs (B, T, H, V)} of "gated" or "gated_delta"; nothing where it is not installed.

    arrays: q, k, v, g, beta (B, T, H, ...) in float32, packed ahead, as a model has them. The state after the tokens is
    computed too: the operator always returns it.
    """
    if importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnx") is None:
        return {}
    import onnxruntime

    (B, T, H, _), shape = arrays["k"].shape, arrays["v"].shape
    given = {"query": arrays["q"], "key": arrays["k"], "value": arrays["v"], "decay": arrays["g"]}
    given |= {"beta": arrays["beta"]} if "beta" in arrays else {}
    packed = {n: np.ascontiguousarray(x.reshape(B, T, -1), np.float32) for n, x in given.items()}
    packed |= {} if state is None else {"past_state": state}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    session = onnxruntime.InferenceSession(_model(rule, packed, H, arrays["k"].shape[-1], shape), options,
                                           providers=["CPUExecutionProvider"])  # fmt: skip
    return {"onnxruntime": lambda: session.run(None, packed)[0].reshape(shape)}


def _model(rule: str, packed: dict[str, np.ndarray], H: int, K: int, shape: tuple[int, ...]) -> bytes:
    """A model of one node."""
    from onnx import TensorProto, helper

    info = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT, x.shape) for n, x in packed.items()}
    B, T, _, V = shape
    results = [helper.make_tensor_value_info("output", TensorProto.FLOAT, (B, T, H * V)),
               helper.make_tensor_value_info("present_state", TensorProto.FLOAT, (B, H, K, V))]  # fmt: skip
    names = [n if n in packed else "" for n in INPUTS]
    names = names[: max(n for n, name in enumerate(names) if name) + 1]
    node = helper.make_node("LinearAttention", names, ["output", "present_state"], domain="com.microsoft",
                            q_num_heads=H, kv_num_heads=H, update_rule=rule, scale=K**-0.5)  # fmt: skip
    graph = helper.make_graph([node], "layer", list(info.values()), results)
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=10).SerializeToString()
