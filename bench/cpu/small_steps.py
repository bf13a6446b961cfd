"""A token of a log whose checkpoints are float32, or few bits, when all of them are larger than the caches.

    python -m bench small_steps [--rounds 8] [--write]

A StateLog of the gated delta rule, 256 sequences, 4 heads, K = V = 128, one thread. Times are those of a whole cycle of
16 tokens with its flush: of each of its steps the least CPU time over the rounds, in which the formats alternate.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import linattn_np as la
from bench import record

B, H, K, LENGTH = 256, 4, 128, 16


def token(rng: np.random.Generator) -> list[np.ndarray]:
    """(q, k, v, g, beta) of one token of every sequence."""
    q, k, v = rng.standard_normal((3, B, 1, H, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = np.full((B, 1, H), -0.01), rng.uniform(0, 1, (B, 1, H))
    return [x.astype(np.float32) for x in (q, k, v, g, beta)]


def steps(pools: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each step of a cycle; the first one flushes."""
    rng = np.random.default_rng(1)
    given = [token(rng) for _ in range(3)]
    logs = {n: la.StateLog(la.gated_delta_rule, x, length=LENGTH, num_threads=1) for n, x in pools.items()}
    found = {n: [float("inf")] * LENGTH for n in logs}
    for turn in range(rounds + 1):
        for name, log in logs.items():
            for t in range(LENGTH):
                began = time.process_time()
                log.step(*given[t % 3])
                if turn:  # the first cycle compiles, and has no flush
                    found[name][t] = min(found[name][t], (time.process_time() - began) * 1e3)
    return found


def main(arguments: list[str]) -> int:
    parser = record.parser("small_steps", __doc__)
    parser.add_argument("--rounds", type=int, default=8)
    options, rows = parser.parse_args(arguments), []
    S = np.random.default_rng(0).standard_normal((B, H, K, K)).astype(np.float32)
    pools = {"float32": S} | {kind: la.pack_state(S, kind) for kind in ("int16", "int12", "int8")}
    found = steps(pools, options.rounds)
    for name, each in found.items():
        rows.append({"state": name, "MB": pools[name].nbytes / 1e6, "ms a token": sum(each) / LENGTH,
                     "ms of a flush": each[0] - each[1],
                     "float32 / this": sum(found["float32"]) / sum(each)})  # fmt: skip
        print(record.cells(rows[-1]), flush=True)
    if options.write:
        what = {"function": "gated_delta_rule", "(B, H, D)": str((B, H, K)), "length": LENGTH, "threads": 1}
        print(record.write("small_steps", record.rounded(what | {"rows": rows})))
    return 0
