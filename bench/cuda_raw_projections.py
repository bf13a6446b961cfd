"""Raw projections and DeltaProduct on a GPU: what lengths taken out and several steps a token cost, FLA beside them.

    python -m bench raw_projections --backend cuda [--results FOLDER] [--spread] [--no-peers]

bfloat16, 8 sequences, 32 heads, K = V = 128, 4096 steps; ns are per step and head. `plain` is the gated delta rule of
keys that have length 1. FLA: chunk_gated_delta_rule(use_qk_l2norm_in_kernel=True), chunk_gated_delta_product.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import linattn_np as la
from bench import cuda_peers, record
from bench import cuda_timing as timing
from bench.cuda_gated_delta_rule import draw, set_to
from linattn_np.cores.matrix_state import cuda_delta_plan

B, T, H, D = 8, 4096, 32, 128
Call = tuple[str, Callable[..., Any], list[list[Any]], dict[str, Any]]  # name, function, arrays and dout, options


def calls(cp: Any) -> list[Call]:
    """What is timed; the last array of each set is dout."""
    sets = [draw(cp, B, T, H, H, D, "bfloat16", seed) for seed in range(2)]
    rate = cp.zeros(H, np.float32)
    raw = [[q, k, v, g.astype(q.dtype), beta, rate, rate, dout] for q, k, v, g, beta, dout in sets]
    found: list[Call] = [
        ("plain", la.gated_delta_rule, sets, {}),
        ("qk_l2norm", la.gated_delta_rule, sets, {"qk_l2norm": True}),
        ("qk_l2norm, gate formula", la.gated_delta_rule, raw, {"qk_l2norm": True}),
    ]
    for n in (2, 3, 4):
        tokens = T // n
        found.append((f"delta_product, {n} steps", la.delta_product, [steps(cp, one, n, tokens) for one in sets], {}))
    return found


def steps(cp: Any, one: list[Any], n: int, tokens: int) -> list[Any]:
    """q, k, v, beta, g, dout of tokens of n steps."""
    q, k, v, g, beta, dout = one
    q, g, dout = (cp.ascontiguousarray(x[:, :tokens]) for x in (q, g, dout))
    k, v, beta = (cp.ascontiguousarray(x[:, : tokens * n]).reshape(B, tokens, n, *x.shape[2:]) for x in (k, v, beta))
    return [q, k, v, beta, g, dout]


def measure(cp: Any, call: Call) -> dict[str, float]:
    """Forward and backward."""
    _, fn, sets, options = call
    count = int(np.prod(sets[0][2].shape[:-1]))
    forward = timing.median_ms(cp, [lambda one=one: fn(*one[:-1], **options) for one in sets] * 3)
    pulls = [la.vjp(fn, *one[:-1], **options)[1] for one in sets]
    back = [lambda pull=pull, one=one: pull(one[-1]) for pull, one in zip(pulls, sets, strict=True)]
    backward = timing.median_ms(cp, back * 3)
    return {"forward_ms": forward, "forward_ns": forward * 1e6 / count,
            "backward_ms": backward, "backward_ns": backward * 1e6 / count}  # fmt: skip


def peers(cp: Any, every: list[Call]) -> dict[str, dict[str, Any]]:
    """FLA's forward on the same arrays, by the name of the call."""
    try:
        import torch
        from fla.ops.gated_delta_product import chunk_gated_delta_product
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        note = f"fla-core {importlib.metadata.version('fla-core')}, Triton{cuda_peers._lift_refusal()}"
    except Exception:  # not installed, or not with this PyTorch
        return {}

    def rule(one: list[Any]) -> Any:
        return chunk_gated_delta_rule(*cuda_peers.tensors(torch, one[:5]), use_qk_l2norm_in_kernel=True)

    def product(one: list[Any]) -> Any:
        q, k, v, beta, g = cuda_peers.tensors(torch, one[:5])
        k, v, beta = (x.flatten(1, 2) for x in (k, v, beta))
        return chunk_gated_delta_product(q, k, v, g, beta, k.shape[1] // q.shape[1])

    found: dict[str, dict[str, Any]] = {}
    for name, fn, sets, _ in every:
        if fn is la.delta_product or name == "qk_l2norm":
            call = product if fn is la.delta_product else rule
            count = int(np.prod(sets[0][2].shape[:-1]))
            try:
                with torch.no_grad():
                    ms = timing.median_ms(cp, [lambda one=one, call=call: call(one) for one in sets] * 3)
                found[name] = {"library": note, "forward_ms": ms, "forward_ns": ms * 1e6 / count}
            except Exception as failed:  # a peer that does not take a shape
                found[name] = {"library": note, "failed": f"{type(failed).__name__}: {failed}"[:200]}
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench raw_projections --backend cuda",
                                     description=__doc__.splitlines()[0])  # fmt: skip
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the JSON file")
    parser.add_argument("--spread", action="store_true", help="DeltaProduct with queries spread over steps too")
    parser.add_argument("--no-peers", action="store_true", help="leave other libraries out")
    args = parser.parse_args(argv)
    import cupy as cp

    every = calls(cp)
    result: dict[str, Any] = timing.card(cp) | {"rows": {}}
    for call in every:
        result["rows"][call[0]] = row = {"linattn_np": measure(cp, call)}
        if call[0] in ("delta_product, 2 steps", "delta_product, 4 steps") and args.spread:
            with set_to("STEPS", (1,), cuda_delta_plan):
                row["linattn_np, queries spread over steps"] = measure(cp, call)
        sys.stdout.write(f"{call[0]}: {row}\n")
        sys.stdout.flush()
    for name, found in ({} if args.no_peers else peers(cp, every)).items():
        result["rows"][name]["peer"] = found
        sys.stdout.write(f"{name}: {found}\n")
    sys.stdout.write(f"{timing.write(args.results, 'cuda_raw_projections', timing.rounded(result))}\n")
    return 0
