"""Time and memory on a CPU as functions of the sizes: predicted and measured.

    python -m bench scaling [--only tokens,width,...] [--write]

The gated delta rule in float32 on one thread, D = K = V = 64 and one head unless stated otherwise. Times are CPU
milliseconds normalised to a core that multiplies at 200 GFLOP/s (timing.py). A point is omitted where one call would
take longer than LONGEST. Memory peaks exclude inputs and include outputs.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import linattn_np as la
from bench import compare, peers, record, timing
from bench.cpu.variants import draw_gated

D, C = 64, 32
LONGEST = 4.0  # seconds of a call, extrapolated from the previous point
ROUNDS = 3
NORMAL = 200.0  # GFLOP/s


def timed(calls: compare.Calls, rounds: int) -> dict[str, float]:
    """Milliseconds normalised to 200 GFLOP/s."""
    return {n: row["gemm_gflop"] / NORMAL * 1e3 for n, row in timing.interleaved(calls, rounds, 10.0).items()}


def once(call: Callable[[], Any]) -> float:
    """Normalised milliseconds of one long call; earlier, shorter calls have compiled it."""
    A = np.random.default_rng(0).standard_normal((timing.SIDE, timing.SIDE)).astype(np.float32)
    found = timing.sample(call, 1, A, np.empty_like(A))
    return found.cpu * found.rate / NORMAL * 1e3


def aligned(x: np.ndarray) -> np.ndarray:
    """A copy aligned to a cache line of 64 bytes."""
    buffer = np.empty(x.nbytes + 64, np.uint8)
    begin = -buffer.ctypes.data % 64
    y = buffer[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


def slope(x: list[float], y: list[float]) -> float:
    """Least-squares slope of log y over log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def grow(values: list[int], power: float, make: Callable[[int], Callable[[], Any]]) -> dict[str, list[float]]:
    """Times and memory peaks over `values`, until the next call, whose time grows as value^power, would be too long."""
    found: dict[str, list[float]] = {"at": [], "ms": [], "peak_mib": []}
    for value in values:
        at, ms = found["at"], found["ms"]
        guess = ms[-1] / 1e3 * (value / at[-1]) ** power if ms else 0.0
        if len(ms) > 2 and guess > LONGEST:
            break
        found["ms"].append(once(make(value)) if guess > 0.1 else timed({"": make(value)}, ROUNDS)[""])
        found["at"].append(value)
        found["peak_mib"].append(round((timing.peak_in_child(lambda value=value: make(value)) or 0) / 2**20, 1))
    return found


def draw(T: int, H: int = 1, width: int = D) -> compare.Arrays:
    """T tokens; beyond 4096 they repeat, because drawing is slow."""
    few = draw_gated((1, min(T, 4096), H, width))
    return {n: np.tile(x, (1, -(-T // 4096)) + (1,) * (x.ndim - 2))[:, :T] for n, x in few.items()}


def call(T: int, H: int = 1, width: int = D, **options: Any) -> Callable[[], Any]:
    """The gated delta rule on T tokens."""
    arrays = draw(T, H, width)
    return lambda: la.gated_delta_rule(**arrays, **options)


def peer(name: str, T: int) -> Callable[[], Any]:
    arrays = draw(T)
    return peers.gated_delta_rule(arrays, False).get(name)


def tokens() -> dict[str, Any]:
    """Slope of time in T: 1 for the recurrence and for chunks, 2 for the parallel form and softmax."""
    T = [1024, 2048, 4096, 8192, 16384, 65536, 262144, 1048576]
    forms: dict[str, tuple[int, Callable[[int], Callable[[], Any]]]] = {
        "recurrent": (1, lambda n: call(n, chunk_size=1, backend="reference")),
        "chunks (NumPy)": (1, lambda n: call(n, backend="chunks")),
        "chunks (Numba)": (1, lambda n: call(n, backend="numba")),
        "parallel": (2, lambda n: call(n, chunk_size="parallel", backend="chunks")),
    }
    of_peer = peers.gated_delta_rule(draw(64), False)
    for label, name, power in (("softmax", "torch_sdpa", 2), ("transformers' chunks", "transformers_chunk", 1)):
        if name in of_peer:
            forms[f"{label} (torch)"] = power, lambda n, name=name: peer(name, n)
    rows = {name: grow(T, power, make) for name, (power, make) in forms.items()}
    found = [{"what": f"slope in T, {name}, {row['at'][n]} to {row['at'][-1]} tokens", "predicted": forms[name][0],
              "measured": slope(row["at"][n:], row["ms"][n:])}
             for name, row in rows.items() for n in ((0, 4) if forms[name][0] == 1 else (0,))]  # fmt: skip
    return {"x": "tokens", "curves": rows, "answers": found}


def width() -> dict[str, Any]:
    """Slope of time in the head width d: operations are 6 d^2 + 4 C d, never d^3."""
    rows = {name: grow([32, 64, 128, 256], 2, lambda d, b=backend: call(2048, 8, d, backend=b))
            for name, backend in (("chunks (NumPy)", "chunks"), ("chunks (Numba)", "numba"))}  # fmt: skip
    count = [compare.delta_work(d, False) for d in (64, 128, 256)]
    found = [{"what": f"slope in d from 64 to 256, {name}", "predicted": slope([64, 128, 256], count),
              "measured": slope(row["at"][1:], row["ms"][1:])} for name, row in rows.items()]  # fmt: skip
    return {"x": "head width", "curves": rows, "answers": found}


def overtaking() -> dict[str, Any]:
    """The T from which chunks (6 d^2 + 4 C d operations per token) are faster than the parallel form (4 d T)."""
    T = [64, 128, 192, 256, 384, 512, 1024]
    rows = {"chunks (NumPy)": grow(T, 1, lambda n: call(n, 8, backend="chunks")),
            "parallel": grow(T, 2, lambda n: call(n, 8, chunk_size="parallel", backend="chunks"))}  # fmt: skip
    chunk, parallel = (rows[name]["ms"] for name in rows)
    first = next((t for t, a, b in zip(T, chunk, parallel, strict=False) if a < b), None)
    found = [{"what": "chunks overtake the parallel form at T, 8 heads",
              "predicted": compare.delta_work(D, False) / (4 * D), "measured": first}]  # fmt: skip
    return {"x": "tokens", "curves": rows, "answers": found}


def chunk_size() -> dict[str, Any]:
    """Time against the chunk size: operations grow with C, the number of chunks falls as 1 / C."""
    T = 2048

    def size(n: int, backend: str) -> Callable[[], Any]:
        return call(T, 8, chunk_size=n, backend="reference" if n == 1 else backend)

    rows = {"chunks (NumPy)": grow([1, 8, 16, 32, 64, 128, 256, 512, T], 0, lambda n: size(n, "chunks")),
            "chunks (Numba)": grow([2, 4, 8, 16, 32, 64, 128], 0, lambda n: size(n, "numba"))}  # fmt: skip
    found = [{"what": f"best chunk, {name}", "predicted": "16 to 64",
              "measured": row["at"][int(np.argmin(row["ms"]))]} for name, row in rows.items()]  # fmt: skip
    count = [compare.delta_work(D, False, n) for n in (32, 128)]
    row = rows["chunks (Numba)"]
    found.append({"what": "time at C = 128 over C = 32, Numba", "predicted": count[1] / count[0],
                  "measured": row["ms"][6] / row["ms"][4]})  # fmt: skip
    return {"x": "chunk size", "curves": rows, "answers": found}


def prefix_scan() -> dict[str, Any]:
    """Chunk states by an associative scan against the sequential loop: more operations, a shorter dependency chain."""
    from linattn_np.call.binding import inputs_of, prepare
    from linattn_np.matrix_state.array import chunks

    def make(T: int, states: str) -> Callable[[], Any]:
        ready = prepare(la.gated_delta_rule.spec, (), draw(T) | {"chunk_size": 64})
        inputs = inputs_of(ready)
        return lambda: chunks.forward(inputs, ready.plan, None, states)

    T = [1024, 4096, 16384]
    rows = {name: grow(T, 1, lambda n, s=s: make(n, s)) for name, s in (("loop", "loop"), ("prefix scan", "scan"))}
    # operations per token and head: loop 6 d^2 + 4 C d; the scan forms M (K, K) per chunk and composes it twice
    work = lambda d, c: 6 * d * d + 4 * c * d  # noqa: E731
    more = work(D, 64) + 2 * D * D + 2 * 64 * D + 2 * 2 * 2 * D**3 / 64
    found = [{"what": "scan over loop, T = 16384, C = 64", "predicted": more / work(D, 64),
              "measured": rows["prefix scan"]["ms"][-1] / rows["loop"]["ms"][-1]}]  # fmt: skip
    return {"x": "tokens", "curves": rows, "answers": found}


def step() -> dict[str, Any]:
    """Time of one token at position n: the state has a fixed size, a KV cache grows."""
    H, positions = 2, [1000, 10_000, 100_000, 1_000_000]
    one = draw(1, H)
    bytes_of_state = 2 * 4 * H * D * D

    def linear(n: int) -> Callable[[], Any]:
        _, end = la.gated_delta_rule(**draw(n, H), return_state=True, backend="numba")
        S = aligned(end)  # the same alignment at every position
        return lambda: la.gated_delta_rule(**one, state=S, return_state=True, overwrite_state=True)

    def cached(n: int) -> Callable[[], Any]:
        import torch

        q, kv = torch.from_numpy(one["q"]).transpose(1, 2), torch.rand(2, 1, H, n, D)
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, kv[0], kv[1])

    ms = timed({str(n): linear(n) for n in positions}, 25)  # interleaved, because they are expected to be equal
    peaks = [round((timing.peak_in_child(lambda n=n: linear(n)) or 0) / 2**20, 1) for n in positions]
    rows = {"linear step": {"at": positions, "ms": [ms[str(n)] for n in positions], "peak_mib": peaks,
                            "bytes": [bytes_of_state] * len(positions)}}  # fmt: skip
    if peers.has_torch():
        rows["softmax, KV cache (torch)"] = grow(positions, 1, cached)
        rows["softmax, KV cache (torch)"]["bytes"] = [2 * 4 * H * n * D for n in positions]
    ms = rows["linear step"]["ms"]
    found = [{"what": "step at position 10^6 over 10^3, linear", "predicted": 1, "measured": ms[-1] / ms[0]}]
    if len(rows) > 1:
        ms = rows["softmax, KV cache (torch)"]["ms"]
        found.append({"what": "the same, softmax with a KV cache", "predicted": 1000, "measured": ms[-1] / ms[0]})
    return {"x": "position", "curves": rows, "answers": found}


def batch() -> dict[str, Any]:
    """Time against the number of heads: proportional once the fixed cost of a call is small."""
    heads, T = [1, 2, 4, 8, 16, 32, 64, 128, 256], 512
    rows = {name: grow(heads, 1, lambda h, b=backend: call(T, h, backend=b))
            for name, backend in (("chunks (NumPy)", "chunks"), ("chunks (Numba)", "numba"))}  # fmt: skip
    found = [{"what": f"slope in heads from 8 to {row['at'][-1]}, {name}", "predicted": 1,
              "measured": slope(row["at"][3:], row["ms"][3:])} for name, row in rows.items()]  # fmt: skip
    return {"x": "heads", "curves": rows, "answers": found}


PARTS = {f.__name__: f for f in (tokens, width, overtaking, chunk_size, prefix_scan, step, batch)}


def main(arguments: list[str]) -> int:
    parser = record.parser("scaling", __doc__)
    parser.add_argument("--only", default=",".join(PARTS))
    options = parser.parse_args(arguments)
    before = record.RESULTS / "scaling.json"
    result = json.loads(before.read_text())["parts"] if before.exists() else {}
    for name in options.only.split(","):
        result[name] = {"question": (PARTS[name].__doc__ or "").strip()} | PARTS[name]()
        for answer in result[name]["answers"]:
            predicted, measured = (f"{x:.3g}" if isinstance(x, int | float) and math.isfinite(x) else str(x)
                                   for x in (answer["predicted"], answer["measured"]))  # fmt: skip
            print(f"{answer['what']:60s} predicted {predicted:>9s}  measured {measured:>9s}", flush=True)
    if options.write:
        sys.stdout.write(f"{record.write('scaling', {'D': D, 'parts': result})}\n")
    return 0
