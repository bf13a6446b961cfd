"""Functions of the softmax core on a CPU, compared with PyTorch.

    python -m bench softmax [--rounds 5] [--write]

One thread, the same inputs, samples interleaved. softmax_attention: torch's scaled_dot_product_attention. The others:
their formulas in tensors, with all logits at once; path_attention also block by block, as this library computes it.
Outputs are checked against float64 first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import linattn_np as la
from bench import compare, peers, record, timing

SHAPES = [(1, 2048, 8, 64), (1, 2048, 4, 128)]
BLOCK = 64


def draw(shape: tuple[int, int, int, int]) -> dict[str, np.ndarray]:
    """Inputs of all functions: unit directions, strengths of 0 to 2, log decays of 0 to -0.1 per token."""
    B, T, H, D = shape
    rng = np.random.default_rng(0)
    q, k, v, w = rng.standard_normal((4, B, T, H, D)).astype(np.float32)
    w /= np.linalg.norm(w, axis=-1, keepdims=True)
    beta, g = rng.uniform(0, 2, (B, T, H)).astype(np.float32), -rng.uniform(0, 0.1, (B, T, H)).astype(np.float32)
    return {"q": q, "k": k, "v": v, "g": g, "w": w, "beta": beta}


def fox(q: Any, k: Any, v: Any, g: Any) -> Any:
    """softmax(Q K^T + b_i - b_j) V"""
    import torch

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    b = torch.cumsum(g, dim=1).transpose(1, 2)
    return _attend(q @ k.mT * q.shape[-1] ** -0.5 + b[..., :, None] - b[..., None, :], v)


def path(q: Any, k: Any, v: Any, w: Any, beta: Any) -> Any:
    """softmax(Q K^T - tril(Q W^T) (I + diag(beta) tril(W W^T, -1))^-1 diag(beta) tril(W K^T, -1)) V"""
    import torch

    q, k, v, w = (x.transpose(1, 2) for x in (q, k, v, w))
    beta = beta.transpose(1, 2)[..., None]
    X = torch.linalg.solve_triangular(beta * (w @ w.mT).tril(-1), beta * (w @ k.mT).tril(-1), upper=False,
                                      unitriangular=True)  # fmt: skip
    return _attend((q @ k.mT - (q @ w.mT).tril() @ X) * q.shape[-1] ** -0.5, v)


def path_blocks(q: Any, k: Any, v: Any, w: Any, beta: Any) -> Any:
    """The same logits block by block: all later queries pass a block of keys by a product."""
    import torch

    B, T, H, D = q.shape
    cut = lambda x: x.transpose(1, 2).reshape(B, H, T // BLOCK, BLOCK, -1)  # noqa: E731
    q, k, w, beta = (cut(x) for x in (q, k, w, beta))
    system = beta * (w @ w.mT).tril(-1)
    U, X = (torch.linalg.solve_triangular(system, y, upper=False, unitriangular=True)
            for y in (beta * w, beta * (w @ k.mT).tril(-1)))  # fmt: skip
    E = (q @ w.mT).tril()
    own, start, end = q @ k.mT - E @ X, q - E @ U, k - X.mT @ w
    R = torch.eye(D) - w.mT @ U
    columns, ahead = [], start[:, :, :0]
    for J in reversed(range(T // BLOCK)):
        z = ahead @ end[:, :, J, None].mT
        none = z.new_zeros(B, H, J, BLOCK, BLOCK)
        columns.append(torch.cat([none, own[:, :, J, None], z], dim=2).flatten(2, 3))
        ahead = torch.cat([start[:, :, J, None], ahead @ R[:, :, J, None]], dim=2)
    return _attend(torch.cat(columns[::-1], dim=-1) * D**-0.5, v.transpose(1, 2))


def _attend(Z: Any, v: Any) -> Any:
    """Weighted averages of v with causal logits."""
    import torch

    future = torch.ones(Z.shape[-2:], dtype=torch.bool).triu(1)
    return (Z.masked_fill(future, -float("inf")).softmax(-1) @ v).transpose(1, 2)


CASES: dict[str, tuple[str, dict[str, Callable[..., Any]]]] = {  # function -> (arrays, forms in tensors)
    "softmax_attention": ("q k v", {"torch_sdpa": lambda **t: peers.sdpa(**t).transpose(1, 2)}),
    "forgetting_attention": ("q k v g", {"torch": fox}),
    "path_attention": ("q k v w beta", {"torch": path, "torch_blocks": path_blocks}),
}


def main(arguments: list[str]) -> int:
    parser = record.parser("softmax", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options, rows = parser.parse_args(arguments), []
    for name, (letters, forms) in CASES.items():
        for shape in SHAPES:
            arrays = {n: x for n, x in draw(shape).items() if n in letters.split()}
            arrays = {n: arrays[n] for n in letters.split()}
            exact = compare.exact(name)(arrays)
            for backward in (False, True):
                calls = compare.ours(name, arrays, backward, ("numba",))
                calls |= peers.torch_calls(forms, arrays, backward) if peers.has_torch() else {}
                for n, call in calls.items() if not backward else ():
                    error = la.testing.relative_error(call(), exact)
                    assert error < 1e-4, f"{n} of {name} is off by {error}"
                found = timing.interleaved(calls, options.rounds, compare.SECONDS)
                base = next(iter(found.values()))["gemm_gflop"]
                for n, row in found.items():
                    what = "forward and backward" if backward else "forward"
                    rows.append({"function": name, "what": what, "shape": list(shape), "name": n, **row,
                                 "ratio": row["gemm_gflop"] / base})  # fmt: skip
                    print(record.cells({x: rows[-1][x] for x in ("function", "what", "name", "cpu_ms", "ratio")}),
                          flush=True)  # fmt: skip
    if options.write:
        print(record.write("softmax", {"rows": rows}))
    return 0
