"""The selective scan on a CPU, relative to the fallback of transformers, which is what models call there.

    python -m bench selective_scan [--rounds 5] [--tokens 2048] [--both 256] [--write]

One thread, samples interleaved, the same inputs; outputs are compared first. The fallback's backward writes an array of
the size of all states for every token, T^2 in all: forward and backward are timed at --both tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import linattn_np as la
from bench import record, timing

D, N = 1536, 16


def draw(T: int) -> dict[str, np.ndarray]:
    """Arrays of one layer of the smallest Mamba: A = -1..-N, steps of 0.001 to 0.1."""
    rng = np.random.default_rng(0)
    x, dt = rng.standard_normal((1, T, D), np.float32), rng.uniform(0.001, 0.1, (1, T, D)).astype(np.float32)
    A, (B, C) = -np.tile(np.arange(1, N + 1, dtype=np.float32), (D, 1)), rng.standard_normal((2, 1, T, N), np.float32)
    return {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": np.ones(D, np.float32)}


def calls(arrays: dict[str, np.ndarray], backward: bool) -> dict[str, Callable[[], Any]]:
    """Ours, and transformers' in its layout (B, D, T); both return the output, or the gradients of all inputs."""
    import torch
    from transformers.models.mamba import modeling_mamba

    torch.set_num_threads(1)
    theirs = [torch.from_numpy(y if y.ndim < 3 else y.transpose(0, 2, 1).copy()) for y in arrays.values()]
    leaves, dout = [y.clone().requires_grad_() for y in theirs], np.ones_like(arrays["x"])
    d = torch.ones_like(theirs[0])
    scan = modeling_mamba.mamba_selective_scan

    def forward_theirs() -> Any:
        with torch.no_grad():
            return scan(*theirs)

    def both() -> Any:
        _, pullback = la.vjp(la.selective_scan, **arrays)
        return pullback(dout)

    if backward:
        return {"linattn_np": both, "transformers": lambda: torch.autograd.grad(scan(*leaves), leaves, d)}
    return {"linattn_np": lambda: la.selective_scan(**arrays), "transformers": forward_theirs}


def error(found: dict[str, Callable[[], Any]]) -> float:
    """The largest difference of the outputs, relative to the largest output."""
    expected = found["transformers"]().numpy().transpose(0, 2, 1)
    return la.testing.relative_error(found["linattn_np"](), expected)


def main(arguments: list[str]) -> int:
    parser = record.parser("selective_scan", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--both", type=int, default=256)
    options, rows = parser.parse_args(arguments), []
    for T, backward in ((options.tokens, False), (options.both, False), (options.both, True)):
        arrays = draw(T)
        off = error(calls(arrays, False))
        found = timing.interleaved(calls(arrays, backward), options.rounds)
        ours, theirs = (found[n] for n in ("linattn_np", "transformers"))
        rows.append({"(B, T, D, N)": str((1, T, D, N)), "what": "forward and backward" if backward else "forward",
                     "CPU ms": ours["cpu_ms"], "ns a token and channel": 1e6 * ours["cpu_ms"] / (T * D),
                     "transformers CPU ms": theirs["cpu_ms"], "ratio": theirs["gemm_gflop"] / ours["gemm_gflop"],
                     "error": off})  # fmt: skip
        print(record.cells(rows[-1]), flush=True)
    if options.write:
        print(record.write("selective_scan", {"threads": 1, "dtype": "float32", "rows": rows}))
    return 0
