"""CPU time of the first call of a process, forward and backward, float32.

    python -m bench first_call [--runs 5] [--write]

With an empty machine-code cache ("compiled") and with a filled one ("from disk").
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

from bench import record

CODE = """
import time, numpy as np, linattn_np as la
x = la.testing.sample(la.gated_delta_rule, np.random.default_rng(0), B=(1,), T={T}, H=2, K=64, V=64)
x = {{name: y.astype(np.float32) for name, y in x.items()}}
start = time.process_time()
out, pullback = la.vjp(la.gated_delta_rule, **x)
pullback(out)
print(time.process_time() - start)
"""
TOKENS = {"chunks": 256, "a few tokens": 4}


def first_call(T: int, folder: str) -> float:
    """CPU seconds in a fresh process whose machine-code cache is `folder`."""
    env = {**os.environ, "LINATTN_CACHE_DIR": folder, "LINATTN_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE.format(T=T)], env=env, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main(arguments: list[str]) -> int:
    """Print the medians and optionally write them."""
    parser = record.parser("first_call", __doc__)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    found = {}
    for words, T in TOKENS.items():
        times: dict[str, list[float]] = {"compiled": [], "from disk": []}
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory() as folder:
                times["compiled"].append(first_call(T, folder))
                times["from disk"].append(first_call(T, folder))
        found[words] = {how: round(statistics.median(x), 3) for how, x in times.items()}
        sys.stdout.write(f"{words:14s} {found[words]} CPU seconds\n")
    if options.write:
        sys.stdout.write(f"{record.write('first_call', {'runs': options.runs, 'cpu_seconds': found})}\n")
    return 0
