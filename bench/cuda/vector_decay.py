"""One decay a token and key channel on a GPU, forward and backward, relative to the device's limits.

    python -m bench vector_decay --backend cuda [--results FOLDER] [--no-peers] [--only gla kda]

Results are checked first against float64 on the same rounded inputs. `ms` is the GPU time of a call enqueued back to
back with others, inputs in rotation, `graph_ms` that of a CUDA graph replay; ns are per token and head. The lower bound
of the time is each array read or written once at the measured copy rate. Gates: mild ones of 0 to -0.05 a token; -5 in
every channel; channels of up to 60 nats a token, with resets, which take the exact path in every head. Free rank-one
terms (rwkv7, dplr) have mild gates of 0 to -0.6, as by RWKV-7's own formula. A bound is gate_lower_bound. Errors
only, of peers too: no decay; mild gates, a tenth of them 0 and a twentieth -60 (mixed); one key at every token,
erased as a whole (equal keys).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from bench.cuda import passes, peers, report, timing


class Case(NamedTuple):
    """A function, its sizes (K = V), the dtype of its gates and their kind."""

    function: str
    B: int
    T: int
    H: int
    K: int = 128
    gate: str = "bfloat16"
    gates: str = "mild"
    bound: float | None = None  # gate_lower_bound, where it is declared
    dtype: str = "bfloat16"  # of q, k and v


CASES = [
    Case("gla", 8, 4096, 32), Case("gla", 1, 32768, 32), Case("gla", 1, 131072, 8), Case("gla", 1, 8192, 16),
    Case("gla", 8, 4096, 32, gate="float32"), Case("gla", 1, 32768, 32, gate="float32"),
    *(Case("gla", *shape, bound=-1.0) for shape in ((8, 4096, 32), (1, 32768, 32), (1, 8192, 16))),
    Case("gla", 8, 4096, 32, gate="float32", bound=-1.0), Case("gla", 8, 4096, 32, gates="exact", bound=-1.0),
    Case("gla", 8, 4096, 32, gates="strong"), Case("gla", 8, 4096, 32, gates="exact"), Case("gla", 8, 4096, 32, 64),
    Case("rwkv6", 8, 4096, 32), Case("hgrn2", 8, 4096, 32),
    Case("kda", 8, 4096, 32), Case("kda", 1, 32768, 32), Case("kda", 1, 131072, 8), Case("kda", 1, 8192, 16),
    Case("kda", 8, 4096, 32, gate="float32"), Case("kda", 8, 4096, 32, gates="strong"),
    Case("kda", 8, 4096, 32, gates="exact"),
    Case("rwkv7", 8, 4096, 32), Case("rwkv7", 8, 4096, 64, 64), Case("rwkv7", 1, 32768, 32),
    Case("rwkv7", 8, 4096, 32, gates="exact"), Case("dplr", 8, 4096, 32), Case("gdn2", 8, 4096, 32),
    *(Case(fn, 8, 4096, 32, gate="float32", dtype=dtype) for fn in ("gla", "rwkv6", "kda")
      for dtype in ("float16", "float32")),
]  # fmt: skip
ACCURACY = [Case(fn, 1, 1023, 4, gates=gates) for fn in ("gla", "rwkv6", "hgrn2", "kda", "rwkv7", "dplr", "gdn2")
            for gates in ("mild", "none", "strong", "mixed", "equal keys")
            if fn != "hgrn2" or gates not in ("none", "equal keys")]  # fmt: skip  # its keys are 1 - e^g
ACCURACY += [case._replace(K=64) for case in ACCURACY if case.function == "rwkv7"]  # the width of its heads
PEER_GATES = {"kda": ("mild", "strong")}  # with which peers are timed; else mild ones
BOUND = 1e-2  # of the norm of the output, of the state and of every gradient
FUNCTION = la.kda  # of the first calls
FREE, ERASES = ("rwkv7", "dplr"), ("kda", "gdn2", "rwkv7", "dplr")  # keys of unit length


def draw(cp: Any, case: Case, seed: int) -> tuple[dict[str, Any], Any]:
    """(the arrays of a call by name, the cotangent of its output)."""
    import ml_dtypes

    rng, shape = cp.random.default_rng(seed), (case.B, case.T, case.H, case.K)
    q, k, v, dout = (rng.standard_normal(shape, dtype=np.float32) for _ in range(4))
    u = rng.random(shape, dtype=np.float32)
    mild = -(0.6 if case.function in FREE else 0.05) * u
    g = cp.full(shape, -5.0, dtype=np.float32) if case.gates == "strong" else mild
    if case.gates == "exact":
        g = -u * 10 ** (5 * rng.random(shape[2:], dtype=np.float32) - np.float32(3.2))
        g[rng.random(shape, dtype=np.float32) < 0.01] = -np.inf
    if case.gates == "none":
        g = 0 * u
    if case.gates == "mixed":
        g = cp.where(u < 0.1, 0, cp.where(u < 0.15, -60, mild)).astype(np.float32)
    kind = np.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
    a = rng.standard_normal(shape, dtype=np.float32)
    equal = case.gates == "equal keys"
    if equal:
        k = cp.ascontiguousarray(cp.broadcast_to(k[:, :1], shape))
        a = k.copy()
    for x in (k, a) if case.function in ERASES else ():
        x /= cp.linalg.norm(x, axis=-1, keepdims=True)
    found = {"q": q.astype(kind), "k": k.astype(kind), "v": v.astype(kind),
             "g": g.astype(kind if case.gate == "bfloat16" else np.float32)}  # fmt: skip
    found["u"] = rng.standard_normal(shape[2:], dtype=np.float32)
    found["beta"] = cp.maximum(rng.random(shape[:3], dtype=np.float32), np.float32(equal))
    rate = cp.maximum(rng.random(shape, dtype=np.float32), np.float32(equal))
    found |= {"a": a.astype(kind), "b": (rate if case.function == "gdn2" else -a * rate).astype(kind)}
    found["w"] = rng.random(shape, dtype=np.float32).astype(kind)
    return {n: found[n] for n in getattr(la, case.function).spec.arrays if n in found}, dout.astype(kind)


def draw_first(cp: Any) -> list[Any]:
    """Arrays and cotangent of a first call."""
    arrays, dout = draw(cp, Case("kda", 1, 4096, 8), 0)
    return [*arrays.values(), dout]


def forward(function: str, arrays: dict[str, Any], **options: Any) -> Any:
    return getattr(la, function)(**arrays, backend="cuda", **options)


def both(function: str, arrays: dict[str, Any], dout: Any, backend: str = "cuda", **options: Any) -> dict[str, Any]:
    """The output and every gradient, by name."""
    out, pullback = la.vjp(getattr(la, function), **arrays, backend=backend, **options)
    return {"out": out} | {f"d{n}": d for n, d in pullback(dout)._asdict().items() if d is not None}


def errors(cp: Any, cases: list[Case], others: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Relative errors against float64, by function, gates and their dtype; by library; by result."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    functions = {case.function for case in cases}
    short = (case._replace(B=1, T=1023, H=4, K=128) for case in cases)
    for case in dict.fromkeys((*short, *(case for case in ACCURACY if case.function in functions))):
        arrays, dout = draw(cp, case, int.from_bytes(os.urandom(4), "little"))
        wide = {n: x.astype(np.float64) for n, x in arrays.items()}
        exact = both(case.function, wide, dout.astype(np.float64), "chunks")
        libraries = {"linattn_np": both(case.function, arrays, dout, **options_of(case))}
        if others and case in ACCURACY:
            for name, pair in peers.vector_decay(case.function).items():
                try:
                    out, grads = pair[1]([*arrays.values(), dout])
                except Exception as error:  # a peer that does not support the case
                    sys.stderr.write(f"{case.function}, {name}: {passes.failure(error)['failed']}\n")
                    continue
                libraries[name] = dict(zip(exact, (out, *grads), strict=False))
        words = "" if case.bound is None else ", declared"
        words += "" if case.dtype == "bfloat16" else f", {case.dtype}"
        words += "" if case.K == 128 else f", {case.K} channels"
        found[f"{case.function}, {case.gates} gates in {case.gate}{words}"] = {
            name: {n: _error(cp, y, exact[n]) for n, y in results.items()} for name, results in libraries.items()
        }
    return found


def summary(found: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Errors at mild gates, and, with 128 channels, without decay and with equal keys, beside other libraries'."""
    words = ", mild gates", ", none gates", ", equal keys gates"
    return {n: e for n, e in found.items() if words[0] in n or (n.endswith("bfloat16") and any(w in n for w in words))}


def _error(cp: Any, y: Any, exact: Any) -> float:
    y = y if isinstance(y, cp.ndarray) else cp.from_dlpack(y.detach().float().contiguous())
    return float(cp.linalg.norm(y.astype(np.float64).reshape(exact.shape) - exact) / cp.linalg.norm(exact))


def options_of(case: Case) -> dict[str, Any]:
    return {} if case.bound is None else {"gate_lower_bound": case.bound}


def work_of(case: Case) -> dict[str, passes.Work]:
    """Per token and head; hgrn2 has no keys of its own. An erase term: grams, an inverse and two products more."""
    D, C, gate, name = case.K, passes.C, passes.BYTES[case.gate], case.function
    strengths, vectors = 4 * (name == "kda"), 2 * (name in (*FREE, "gdn2"))  # bytes; arrays besides q, k, v and g
    arrays, size = 3 + (name != "hgrn2") + vectors, passes.BYTES[case.dtype]  # with the output
    grams = 4 if vectors else 1
    more = (name in ERASES) * (4 * C * D * grams + C * C + 2 * D * D)
    ahead = passes.Work(arrays * size * D + gate * D + strengths, 4 * C * D + 4 * D * D + more)
    back = passes.Work((2 * arrays - 1) * size * D + 2 * gate * D + 2 * strengths, 2.5 * ahead.operations)
    return passes.three(ahead, back)


def measure(cp: Any, cases: list[Case], limits: passes.Limits, others: bool) -> Iterator[dict[str, Any]]:
    """A row per case."""
    for case in cases:
        sets = [draw(cp, case, seed) for seed in range(2)]
        tokens, work, times = case.B * case.T * case.H, work_of(case), {}
        options = options_of(case)
        calls = {"forward": [functools.partial(forward, case.function, one[0], **options) for one in sets],
                 "both": [functools.partial(both, case.function, *one, **options) for one in sets]}  # fmt: skip
        for name, each in calls.items():
            times[name] = passes.against_limits(cp, each * (3 if name == "forward" else 2), tokens, work[name], limits)
            times[name]["peak_bytes"] = timing.peak_bytes(cp, each[0])
        ms = timing.graph_ms(cp, calls["forward"])
        times["forward"] |= {"graph_ms": ms, "graph_ns": ms * 1e6 / tokens}
        gates = PEER_GATES.get(case.function, ("mild",))
        if others and case.gates in gates and case.gate == "bfloat16" and case.bound is None:
            times |= theirs(cp, case, sets, times)
        row = {**case._asdict(), "times": times}
        report.show(row, Case._fields)
        yield row
        del sets, calls
        cp.get_default_memory_pool().free_all_blocks()


def theirs(cp: Any, case: Case, sets: list[Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Times and memory of other libraries' kernels, relative to ours, where they are installed and have them."""
    given, found = [[*arrays.values(), dout] for arrays, dout in sets], {}
    for name, pair in peers.vector_decay(case.function).items():
        for what, row, call in passes.peer_times(cp, pair, given, case.B * case.T * case.H, rounds=2):
            if "ms" in row:
                row |= {"peak_bytes": peers.peak_bytes(call), "times_ours": row["ms"] / ours[what]["ms"]}
            found[f"{what}: {name}"] = row
    return found


def case_of(row: dict[str, Any]) -> Case:
    return Case(**{n: row[n] for n in Case._fields if n in row})


def main(argv: list[str]) -> int:
    parser = report.parser("vector_decay", __doc__)
    parser.add_argument("--only", nargs="+", metavar="FUNCTION", help="measure these only and replace their rows")
    args = parser.parse_args(argv)
    import cupy as cp

    cases, others = [c for c in CASES if args.only is None or c.function in args.only], not args.no_peers
    found = errors(cp, cases, others)
    own = {n: e["linattn_np"] for n, e in found.items() if "equal keys" not in n}
    if wrong := {n: e for n, e in own.items() if not max(e.values()) <= BOUND}:
        sys.stderr.write(f"wrong: {wrong}\n")
        return 1
    limits = passes.limits_of(cp)
    result, rows = report.device(cp) | limits | {"errors": summary(found)}, measure(cp, cases, limits, others)
    if args.only is not None:
        report.replace(args.results, "cuda_vector_decay", result, rows, case_of, CASES)
        return 0
    result["first_call"] = passes.first_calls("vector_decay")
    report.write_each(args.results, "cuda_vector_decay", result, rows)
    return 0
