"""Softmax attention on a GPU by its portable kernels: tokens after a cache, float32, wide heads.

    python -m bench portable_attention --backend cuda [--results FOLDER] [--no-peers] [--cases N ...] [--tiles N ...]

Results are checked first against float64 on the same rounded inputs. `rows` are calls of one token, or a few, that
overwrite a full cache of L slots, in rotation over more caches than the L2 cache holds: in a CUDA graph, in an eager
loop, host time; floor_us is the time of reading the cache at 4.8 TB/s, the vendor's figure. Peers: PyTorch's
scaled_dot_product_attention on the same arrays, by the kernel that it chooses and by each that can be selected,
without appending the token. `tiles` are causal calls as in `softmax`, nanoseconds per token and head of the queries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from bench import record
from bench.cuda import passes, peers, report, softmax, timing

RATE = 4.8e12  # bytes a second
ROTATED = 256 << 20  # least bytes of the caches in rotation


class Case(NamedTuple):
    """A function, its sizes (K = V), the heads of keys and values, tokens of a call, the dtype of all arrays."""

    function: str
    B: int
    L: int
    H: int = 32
    Hk: int = 8
    K: int = 128
    T: int = 1
    dtype: str = "bfloat16"


CASES = [
    Case("softmax_attention", 8, 16384), Case("softmax_attention", 1, 16384), Case("softmax_attention", 8, 1024),
    Case("softmax_attention", 1, 1024), Case("softmax_attention", 8, 4096, Hk=32),
    Case("softmax_attention", 8, 16384, T=4), Case("softmax_attention", 8, 16384, dtype="float32"),
    Case("forgetting_attention", 8, 16384),
    Case("forgetting_attention", 1, 1024), Case("alibi", 8, 16384),
]  # fmt: skip
TILES = [softmax.Case("softmax_attention", 2, 4096, 16, dtype="float32"),
         softmax.Case("softmax_attention", 2, 4096, 16, 256), softmax.Case("forgetting_attention", 2, 4096, 16, 256),
         softmax.Case("forgetting_attention", 2, 4096, 16, dtype="float32")]  # fmt: skip


def kind_of(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def draw(cp: Any, case: Case, seed: int) -> tuple[dict[str, Any], Any]:
    """(the arrays of a call, a full cache)."""
    rng, kind = cp.random.default_rng(seed), kind_of(case.dtype)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32).astype(kind)  # noqa: E731
    arrays = {"q": normal(case.B, case.T, case.H, case.K)}
    arrays |= {n: normal(case.B, case.T, case.Hk, case.K) for n in ("k", "v")}
    k, v = (normal(case.B, case.L, case.Hk, case.K) for _ in range(2))
    length = cp.full(case.B, case.L, dtype=np.int64)
    if case.function == "softmax_attention":
        return arrays, la.KeyValueCache(k, v, length)
    if case.function == "alibi":
        arrays["slopes"] = 2 ** (-8 * cp.arange(1, case.H + 1, dtype=np.float32) / case.H)
    else:
        arrays["g"] = -0.05 * rng.random((case.B, case.T, case.H), dtype=np.float32)
    b = -cp.linspace(case.L * 1e-3, 0, case.L, dtype=np.float32)[None, :, None]
    return arrays, la.GatedCache(k, v, cp.zeros((case.B, case.L, case.H), np.float32) + b, length)


def calls_of(case: Case, arrays: dict[str, Any], caches: list[Any]) -> list[Callable[[], Any]]:
    fn = getattr(la, case.function)
    return [lambda S=S: fn(**arrays, state=S, overwrite_state=True) for S in caches]


def error(cp: Any, case: Case) -> float:
    """Of the output, against float64."""
    arrays, cache = draw(cp, case._replace(B=2, L=1500), int.from_bytes(os.urandom(4), "little"))
    fn, wide = getattr(la, case.function), lambda x: x.astype(np.float64)
    exact = fn(**{n: wide(x) for n, x in arrays.items()}, state=type(cache)(*map(wide, cache)))
    out = wide(fn(**arrays, state=cache))
    return float(cp.linalg.norm(out - exact) / cp.linalg.norm(exact))


def peer_rows(cp: Any, case: Case, arrays: dict[str, Any], caches: list[Any]) -> Iterator[dict[str, Any]]:
    """PyTorch's function on the same arrays."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, *_ = peers.tensors(torch, [arrays["q"].swapaxes(1, 2)])
    pairs = [peers.tensors(torch, [S.k.swapaxes(1, 2), S.v.swapaxes(1, 2)]) for S in caches]
    attend, grouped = torch.nn.functional.scaled_dot_product_attention, case.Hk != case.H
    calls = [lambda k=k, v=v: attend(q, k, v, enable_gqa=grouped) for k, v in pairs]
    for name in (None, "FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        row = {"name": f"torch {torch.__version__} SDPA{f' by {name}' if name else ''}"}
        try:
            with torch.no_grad(), sdpa_kernel(list(SDPBackend.__members__.values())[1:4] if name is None
                                              else [getattr(SDPBackend, name)]):  # fmt: skip
                row |= {
                    "graph_us": timing.replay_ms(cp, peers.graph_of(calls)) * 1e3 / len(calls),
                    "eager_us": timing.eager_ms(cp, calls) * 1e3,
                }
        except Exception as found:
            row |= passes.failure(found)
        yield row


def decoding(cp: Any, cases: list[Case], others: bool) -> Iterator[dict[str, Any]]:
    """A row per case."""
    for case in cases:
        arrays, first = draw(cp, case, 0)
        size = first.k.nbytes + first.v.nbytes + (first.b.nbytes * 2 if "b" in first._fields else 0)
        caches = [first, *(type(first)(*(x.copy() for x in first)) for _ in range(min(-(-ROTATED // size), 32) - 1))]
        calls = calls_of(case, arrays, caches)
        row: dict[str, Any] = case._asdict() | {"bytes": size, "floor_us": size / RATE * 1e6}
        row["graph_us"] = timing.graph_ms(cp, calls) * 1e3
        row |= {"eager_us": timing.eager_ms(cp, calls) * 1e3, "host_us": timing.host_us(cp, calls[0], 100)}
        row["times_floor"] = row["graph_us"] / row["floor_us"]
        if others and case.function == "softmax_attention" and case.T == 1:
            row["peers"] = list(peer_rows(cp, case, arrays, caches))
        sys.stdout.write(record.cells(row, skip=("bytes",)) + "\n")
        sys.stdout.flush()
        yield row
        del arrays, first, caches, calls
        cp.get_default_memory_pool().free_all_blocks()


def main(argv: list[str]) -> int:
    parser = report.parser("portable_attention", __doc__)
    parser.add_argument("--cases", nargs="*", type=int, default=list(range(len(CASES))), metavar="N")
    parser.add_argument("--tiles", nargs="*", type=int, default=list(range(len(TILES))), metavar="N")
    args = parser.parse_args(argv)
    import cupy as cp

    cases, tiles, others = [CASES[n] for n in args.cases], [TILES[n] for n in args.tiles], not args.no_peers
    found = {f"{c.function}, {c.dtype}": error(cp, c) for c in dict.fromkeys(c._replace(B=2, L=1500) for c in cases)}
    if wrong := {n: e for n, e in found.items() if not e <= softmax.BOUND}:
        sys.stderr.write(f"wrong: {wrong}\n")
        return 1
    result = report.device(cp) | {"errors": found, "tile_errors": softmax.errors(cp, tiles, False), "tiles": []}
    report.write_each(args.results, "cuda_portable_attention", result, decoding(cp, cases, others))
    for row in softmax.measure(cp, tiles, passes.limits_of(cp), others):
        result["tiles"].append(row)
        report.write(args.results, "cuda_portable_attention", result)
    return 0
