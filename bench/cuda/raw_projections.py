"""Raw projections and DeltaProduct on a GPU: the cost of l2 norms, gate formulas and several steps per token; FLA.

    python -m bench raw_projections --backend cuda [--results FOLDER] [--expand] [--no-peers]

bfloat16, 8 sequences, 32 heads, K = V = 128, 4096 steps; ns are per step and head. `plain` is the gated delta rule
of unit keys. FLA: chunk_gated_delta_rule(use_qk_l2norm_in_kernel=True), chunk_gated_delta_product.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import linattn_np as la
from bench.cuda import passes, report
from bench.cuda import peers as cuda_peers
from bench.cuda.gated_delta_rule import Shape, draw

B, T, H, D = 8, 4096, 32, 128
Call = tuple[str, Callable[..., Any], list[list[Any]], dict[str, Any]]  # name, function, arrays and dout, options


def calls(cp: Any) -> list[Call]:
    """The timed calls; the last array of each set is dout."""
    sets = [draw(cp, Shape(B, T, H, H, D, "bfloat16"), seed) for seed in range(2)]
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
    """q, k, v, beta, g, dout with n steps per token."""
    q, k, v, g, beta, dout = one
    q, g, dout = (cp.ascontiguousarray(x[:, :tokens]) for x in (q, g, dout))
    k, v, beta = (cp.ascontiguousarray(x[:, : tokens * n]).reshape(B, tokens, n, *x.shape[2:]) for x in (k, v, beta))
    return [q, k, v, beta, g, dout]


def measure(cp: Any, call: Call) -> dict[str, float]:
    """Times of forward and backward."""
    _, fn, sets, options = call
    pulls = [la.vjp(fn, *one[:-1], **options)[1] for one in sets]
    ahead = [lambda one=one: fn(*one[:-1], **options) for one in sets]
    back = [lambda pull=pull, one=one: pull(one[-1]) for pull, one in zip(pulls, sets, strict=True)]
    return _row(cp, "forward", ahead, sets) | _row(cp, "backward", back, sets)


def _row(cp: Any, what: str, each: passes.Calls, sets: list[list[Any]]) -> dict[str, float]:
    """Times of one pass; v has a row per step and head."""
    timed = passes.timed(cp, [*each] * 3, int(np.prod(sets[0][2].shape[:-1])))
    return {f"{what}_{n}": x for n, x in timed.items()}


def peers(cp: Any, every: list[Call]) -> dict[str, dict[str, Any]]:
    """FLA's forward on the same arrays, by the name of the call."""
    try:
        import torch
        from fla.ops.gated_delta_product import chunk_gated_delta_product
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        note = ", ".join(cuda_peers.fla())
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
            try:
                with torch.no_grad():
                    row = _row(cp, "forward", [lambda one=one, call=call: call(one) for one in sets], sets)
            except Exception as error:  # a peer that does not support the case
                row = passes.failure(error)
            found[name] = {"library": note} | row
    return found


def main(argv: list[str]) -> int:
    parser = report.parser("raw_projections", __doc__)
    parser.add_argument("--expand", action="store_true", help="also DeltaProduct with queries expanded to all steps")
    args = parser.parse_args(argv)
    import cupy as cp

    every = calls(cp)
    result: dict[str, Any] = report.device(cp) | {"rows": {}}
    for call in every:
        result["rows"][call[0]] = row = {"linattn_np": measure(cp, call)}
        if call[0] in ("delta_product, 2 steps", "delta_product, 4 steps") and args.expand:
            with passes.override("DELTA_STEPS", (1,)):
                row["linattn_np, queries expanded to all steps"] = measure(cp, call)
        sys.stdout.write(f"{call[0]}: {row}\n")
        sys.stdout.flush()
    for name, found in ({} if args.no_peers else peers(cp, every)).items():
        result["rows"][name]["peer"] = found
        sys.stdout.write(f"{name}: {found}\n")
    sys.stdout.write(f"{report.write(args.results, 'cuda_raw_projections', result)}\n")
    return 0
