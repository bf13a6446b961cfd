"""Peak resident memory of one forward and backward call, each variant in a fresh process.

python -m bench memory [--tokens 131072] [--variants gla,kda] [--write]
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import linattn_np as la
from bench import record

H, K, V = 4, 64, 64
GIB = 2**30
LINEAR = [fn.__name__ for fn in la.VARIANTS if "state" in fn.spec.core.STATE_AXES]  # time linear in the tokens


def _arrays(fn: Any, T: int) -> dict[str, np.ndarray]:
    """float32 arrays of a call, drawn 4096 tokens at a time to keep temporary memory small."""
    rng, arrays, step = np.random.default_rng(0), {}, 4096
    for start in range(0, T, step):
        piece = la.testing.sample(fn, rng, B=(1,), T=min(step, T - start), H=H, K=K, V=V)
        for name, x in piece.items():
            if x.shape[:2] != (1, min(step, T - start)):  # no token axis
                arrays.setdefault(name, x.astype(np.float32))
                continue
            whole = arrays.setdefault(name, np.empty((1, T, *x.shape[2:]), np.float32))
            whole[:, start : start + step] = x
    if "b" in arrays and "a" in arrays:
        np.multiply(arrays["a"], -0.5, out=arrays["b"])  # a contraction: the state stays bounded
    return arrays


def peak_rss() -> int:
    """Peak resident size of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def measure(name: str, T: int) -> dict[str, float]:
    """Memory and time of forward and backward in this process."""
    fn = getattr(la, name)
    arrays = _arrays(fn, T)
    given = sum(x.nbytes for x in arrays.values())
    before, start = peak_rss(), time.perf_counter()
    (out, state), pullback = la.vjp(fn, **arrays, return_state=True, chunk_size=64)
    middle, forward = peak_rss(), time.perf_counter()
    parts = state if isinstance(state, tuple) else (state,)
    ones = [np.ones_like(S) for S in parts]
    grads = pullback(np.ones_like(out), type(state)(*ones) if isinstance(state, tuple) else ones[0])
    end = time.perf_counter()
    *own, dstate = grads
    results = [out, *parts, *own, *(dstate if isinstance(dstate, tuple) else (dstate,))]
    results = [x for x in results if x is not None]
    returned, finite = sum(x.nbytes for x in results), all(np.isfinite(x).all() for x in results)
    return {
        "inputs_gib": given / GIB,
        "outputs_gib": returned / GIB,
        "before_gib": before / GIB,
        "forward_gib": middle / GIB,
        "peak_gib": peak_rss() / GIB,
        "forward_s": forward - start,
        "backward_s": end - forward,
        "finite": finite,
    }


def in_fresh_process(name: str, T: int) -> dict[str, float]:
    """`measure` in a fresh process."""
    code = f"import json; from bench.memory import measure; print(json.dumps(measure({name!r}, {T})))"
    root = Path(__file__).parent.parent
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{name}: {ran.stderr[-2000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


def main(argv: list[str]) -> int:
    parser = record.parser("memory", __doc__)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--variants", default=",".join(LINEAR))
    args = parser.parse_args(argv)
    found = {}
    print(f"T = {args.tokens}, H = {H}, K = {K}, V = {V}, float32, chunks of 64; GiB")
    print(f"{'':22s} {'inputs':>8s} {'outputs':>8s} {'forward':>8s} {'peak':>8s} {'seconds':>14s}")
    for name in args.variants.split(","):
        m = found[name] = in_fresh_process(name, args.tokens)
        print(
            f"{name:22s} {m['inputs_gib']:8.2f} {m['outputs_gib']:8.2f} {m['forward_gib']:8.2f} {m['peak_gib']:8.2f} "
            f"{m['forward_s']:6.1f} + {m['backward_s']:.1f}",
            flush=True,
        )
    if args.write:
        sizes = {"T": args.tokens, "H": H, "K": K, "V": V, "dtype": "float32", "chunk_size": 64}
        rounded = {n: {k: x if isinstance(x, bool) else round(x, 3) for k, x in m.items()} for n, m in found.items()}
        print(record.write("memory", {"sizes": sizes, "variants": rounded}))
    return 0
