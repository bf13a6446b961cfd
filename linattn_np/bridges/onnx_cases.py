"""Conformance cases of LinearAttention and CausalConvWithState, for any implementation of ONNX (opset 27).

    python -m linattn_np.bridges.onnx_cases FOLDER

writes each case in the layout of ONNX's own backend tests: FOLDER/NAME/model.onnx, test_data_set_0/input_0.pb, ...,
output_0.pb, ... Outputs come from the equations, token by token in float64, and are rounded once to float32. Cases are
edges of the definition: decays of 0 and -inf, beta of 0 and 2, equal keys, groups of heads, one strength for all heads,
one token after a state, fewer tokens than the convolution is long.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .onnx import NEEDS, OPSET

Arrays = dict[str, np.ndarray]
INPUTS = ("query", "key", "value", "past_state", "decay", "beta")
CONVOLVED = ("input", "weight", "bias", "past_state")
RELATIVE = 1e-5  # of the largest number of an output: the error that float32 sums may have


class Case(NamedTuple):
    """A model of one node, its inputs by name and its outputs."""

    name: str
    model: onnx.ModelProto
    inputs: Arrays
    outputs: Arrays


def cases() -> Iterator[Case]:
    """Every case."""
    for rule in NEEDS:
        for decays in ("head", "channel") if "decay" in NEEDS[rule] else ("",):
            name = f"linear_attention_{rule}" + (f"_{decays}_decay" if decays else "")
            yield _attention(name, rule, decays)
            yield _attention(f"{name}_groups", rule, decays, Hq=6, H=2, T=70)
            yield _attention(f"{name}_no_past", rule, decays, has_past=False, scale=0.5)
            yield _attention(f"{name}_one_token", rule, decays, T=1)
            if decays:
                yield _attention(f"{name}_resets", rule, decays, gates=(0.0, -50.0, -np.inf), T=33)
            if "beta" in NEEDS[rule]:
                yield _attention(f"{name}_shared_beta", rule, decays, shared=True)
                yield _attention(f"{name}_equal_keys", rule, decays, strengths=(0.0, 1.0, 2.0), equal=True, T=40)
    for k in (1, 2, 4):
        for activation in ("none", "silu", "swish"):
            yield _convolution(f"causal_conv_with_state_{k}_{activation}", k, activation)
        yield _convolution(f"causal_conv_with_state_{k}_no_past", k, "silu", has_past=False, has_bias=False)
        yield _convolution(f"causal_conv_with_state_{k}_one_token", k, "none", T=1)


def write(folder: Path) -> int:
    """Write every case; how many."""
    count = 0
    for case in cases():
        data = folder / case.name / "test_data_set_0"
        data.mkdir(parents=True, exist_ok=True)
        onnx.save(case.model, folder / case.name / "model.onnx")
        for kind, arrays in (("input", case.inputs), ("output", case.outputs)):
            for n, (name, x) in enumerate(arrays.items()):
                (data / f"{kind}_{n}.pb").write_bytes(numpy_helper.from_array(x, name).SerializeToString())
        count += 1
    return count


# LinearAttention


def _attention(name: str, rule: str, decays: str, *, B: int = 2, T: int = 9, Hq: int = 2, H: int = 2, K: int = 5,
               V: int = 3, has_past: bool = True, shared: bool = False, equal: bool = False, scale: float = 0.0,
               gates: tuple[float, ...] = (), strengths: tuple[float, ...] = ()) -> Case:  # fmt: skip
    """A case of a rule. gates, strengths: the values that decay and beta have; drawn at random otherwise."""
    rng = np.random.default_rng(len(name))
    q, k, v = rng.standard_normal((B, T, Hq, K)), rng.standard_normal((B, T, H, K)), rng.standard_normal((B, T, H, V))
    k = np.broadcast_to(k[:, :1], k.shape) if equal else k
    x = {"query": q, "key": k / np.linalg.norm(k, axis=-1, keepdims=True), "value": v}
    if has_past:
        x["past_state"] = rng.standard_normal((B, H, K, V))
    if decays:
        shape = (B, T, H) if decays == "head" else (B, T, H, K)
        x["decay"] = rng.choice(gates, shape) if gates else -rng.uniform(0, 0.3, shape)
    if "beta" in NEEDS[rule]:
        shape = (B, T, 1 if shared else H)
        x["beta"] = rng.choice(strengths, shape) if strengths else rng.uniform(0, 1, shape)
    x = {n: x[n].astype(np.float32) for n in INPUTS if n in x}
    out, state = _recurrence(x, scale or K**-0.5)
    packed = {n: y if n == "past_state" else y.reshape(B, T, -1) for n, y in x.items()}
    outputs = {"output": out.reshape(B, T, Hq * V), "present_state": state}
    attributes: dict[str, Any] = {"q_num_heads": Hq, "kv_num_heads": H, "update_rule": rule, "scale": scale}
    names = [n if n in packed else "" for n in INPUTS]
    return _case(name, "LinearAttention", names, packed, outputs, attributes)


def _recurrence(x: Arrays, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """S~ = diag(e^decay) S;  S = S~ + k^T beta (v - k S~), or S~ + k^T v;  out = scale q S.   In float64."""
    x = {n: y.astype(np.float64) for n, y in x.items()}
    q, k, v = x["query"], x["key"], x["value"]
    (B, T, Hq, K), (H, V) = q.shape, v.shape[2:]
    S = x.get("past_state", np.zeros((B, H, K, V))).copy()
    out = np.zeros((B, T, Hq, V))
    for t in range(T):
        if "decay" in x:
            g = np.exp(x["decay"][:, t])
            S *= (g[..., None] if g.ndim == 2 else g)[..., None]
        write = v[:, t]
        if "beta" in x:
            write = x["beta"][:, t, :, None] * (write - np.einsum("bhk,bhkv->bhv", k[:, t], S))
        S += k[:, t, :, :, None] * write[:, :, None, :]
        out[:, t] = scale * np.einsum("bhk,bhkv->bhv", q[:, t], np.repeat(S, Hq // H, axis=1))
    return out, S


# CausalConvWithState


def _convolution(name: str, k: int, activation: str, *, B: int = 2, C: int = 3, T: int = 7, has_past: bool = True,
                 has_bias: bool = True) -> Case:  # fmt: skip
    """A case of k weights."""
    rng = np.random.default_rng(len(name))
    x = {"input": rng.standard_normal((B, C, T)), "weight": rng.standard_normal((C, 1, k))}
    if has_bias:
        x["bias"] = rng.standard_normal(C)
    if has_past:
        x["past_state"] = rng.standard_normal((B, C, k - 1))
    x = {n: y.astype(np.float32) for n, y in x.items()}
    wide = {n: y.astype(np.float64) for n, y in x.items()}
    past = wide.get("past_state", np.zeros((B, C, k - 1)))
    rows = np.concatenate([past, wide["input"]], axis=-1)
    out = (
        sum(wide["weight"][:, 0, j, None] * rows[..., j : j + T] for j in range(k))
        + wide.get("bias", np.zeros(C))[:, None]
    )
    out = out if activation == "none" else out / (1 + np.exp(-out))
    names = [n if n in x else "" for n in CONVOLVED]
    outputs = {"output": out, "present_state": rows[..., T:]}
    return _case(name, "CausalConvWithState", names, x, outputs, {"activation": activation})


def _case(name: str, operator: str, names: list[str], inputs: Arrays, outputs: Arrays, attributes: dict[str, Any]
          ) -> Case:  # fmt: skip
    """A model of one node; names: of its inputs, "" for those that are not given."""
    while not names[-1]:
        names.pop()
    outputs = {n: y.astype(np.float32) for n, y in outputs.items()}
    info = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT, x.shape) for n, x in (inputs | outputs).items()}
    node = helper.make_node(operator, names, list(outputs), **attributes)
    graph = helper.make_graph([node], name, [info[n] for n in inputs], [info[n] for n in outputs])
    return Case(name, helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)]), inputs, outputs)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m linattn_np.bridges.onnx_cases FOLDER")
    sys.stdout.write(f"{write(Path(sys.argv[1]))} cases in {sys.argv[1]}\n")
