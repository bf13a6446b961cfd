"""`python -m bench gated_delta_rule [--threads N] [--rounds N] [--write]`: forward, float32, beside its peers."""

from __future__ import annotations

import argparse
import os
import sys

SHAPES = [(1, 2048, 8, 64), (1, 4096, 8, 128)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench gated_delta_rule", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="keep the result under bench/results/")
    options = parser.parse_args(arguments)
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ["LINATTN_NP_NUM_THREADS"] = str(options.threads)
    from bench import record  # NumPy reads the number of threads when it is imported

    rows = [row for shape in SHAPES for row in measure(shape, options.threads, options.rounds)]
    for row in rows:
        print("(B, T, H, D) = {shape}  {name:20s} cpu {cpu_ms:9.1f} ms  wall {wall_ms:9.1f} ms  {ratio:6.1f}x  "
              "{share:4.0f} % of GEMM".format(**row))  # fmt: skip
    if options.write:
        sys.stdout.write(f"{record.write('gated_delta_rule', {'threads': options.threads, 'rows': rows})}\n")
    return 0


def measure(shape: tuple[int, int, int, int], threads: int, rounds: int) -> list[dict]:
    """A row a call: its times, its ratio to ours, and useful operations over what the product beside it would do."""
    import numpy as np

    import linattn_np as la
    from bench import peers, timing

    B, T, H, D = shape
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, B, T, H, D)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = -rng.uniform(0, 0.1, (B, T, H)).astype(np.float32)
    beta = rng.uniform(0, 1, (B, T, H)).astype(np.float32)
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    ours = {f"linattn_np_{name}": lambda name=name: la.gated_delta_rule(**arrays, backend=name)
            for name in ("numba", "chunks")}  # fmt: skip
    calls = ours | peers.gated_delta_rule(arrays, threads)
    expected = la.gated_delta_rule(**{n: x.astype(np.float64) for n, x in arrays.items()})
    worst = {name: float(np.abs(y - expected).max() / np.abs(expected).max())
             for name, call in calls.items() if (y := call()) is not None}  # fmt: skip
    times = timing.interleaved(calls, rounds)
    useful = (6 * D * D + 4 * 32 * D) * B * T * H / 1e9  # the chunk form with chunks of 32, lower triangles only
    base = times["linattn_np_numba"]["gemm_gflop"]
    return [{"shape": list(shape), "name": name, **row, "ratio": row["gemm_gflop"] / base,
             "share": 100 * useful / row["gemm_gflop"], "error": worst.get(name)}
            for name, row in times.items()]  # fmt: skip
