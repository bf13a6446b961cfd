"""The linear recurrence on a CPU: its share of a copy of the same bytes, one and two threads, beside its peers.

    python -m bench scans [--rounds 15] [--seconds 240] [--write]

h_t = a_t h_{t-1} + x_t in float32, (B, T, D). The forward reads a and x and writes h: three arrays, with constant
factors two. The backward reads a, x and the gradient of h, and writes those of a and x: five more, with constant
factors three. A share is these bytes over the CPU time of all threads, relative to a copy by one thread into memory
that is there, measured between the calls; the factor of two threads is of wall-clock times, beside that of a copy by
two threads, half of it each, which is what the memory of the machine gives a second thread. Peers, forward alone:
scipy.signal.lfilter with constant factors, and torch's associative_scan, where they are installed. Every call is
compared with the definition first. Shapes share --seconds; each is measured in three rounds at least. quiet: the fewest
samples without other load of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np

import linattn_np as la
from bench import record, timing

SHAPES = ((1, 2048, 1536), (2, 2048, 1536), (1, 1024, 4096))  # results fit into the pool of freed memory
Call = Callable[[], Any]


def draw(shape: tuple[int, int, int], constant: bool) -> tuple[np.ndarray, np.ndarray]:
    """(a, x)"""
    rng = np.random.default_rng(0)
    a = rng.uniform(0.8, 1.0, shape[-1:] if constant else shape).astype(np.float32)
    return (np.full_like(a, 0.9) if constant else a), rng.standard_normal(shape).astype(np.float32)


def both(a: np.ndarray, x: np.ndarray, threads: int) -> None:
    """Forward and backward."""
    _, pullback = la.vjp(la.scan, a, x, num_threads=threads)
    pullback(x)


def halves(helper: Executor, to: np.ndarray, source: np.ndarray) -> None:
    """A copy by two threads."""
    other = helper.submit(np.copyto, to[1], source[1])
    np.copyto(to[0], source[0])
    other.result()


def peers(a: np.ndarray, x: np.ndarray) -> dict[str, Call]:
    """The forward of those that are installed."""
    found: dict[str, Call] = {}
    if a.ndim == 1:
        try:
            from scipy.signal import lfilter

            found["scipy"] = lambda: lfilter(np.float32([1]), np.float32([1, -a[0]]), x, axis=1)
        except ImportError:
            pass
        return found
    try:
        import torch
        from torch._higher_order_ops.associative_scan import associative_scan
    except ImportError:
        return found
    torch.set_num_threads(1)
    given = tuple(torch.from_numpy(y) for y in (a, x))
    combine = lambda first, second: (second[0] * first[0], second[0] * first[1] + second[1])  # noqa: E731
    return {"torch": lambda: associative_scan(combine, given, dim=1, combine_mode="generic")[1].numpy()}


def main(arguments: list[str]) -> int:
    parser = record.parser("scans", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=240)
    options, rows, helper = parser.parse_args(arguments), [], ThreadPoolExecutor(1)
    for shape in SHAPES:
        for constant in (False, True):
            a, x = draw(shape, constant)
            source, to = np.ones((2, *shape), np.float32), np.zeros((2, *shape), np.float32)
            calls: dict[str, Call] = {"copy": functools.partial(np.copyto, to, source),
                                      "copy 2": functools.partial(halves, helper, to, source)}  # fmt: skip
            for n in (1, 2):
                calls[f"forward {n}"] = functools.partial(la.scan, a, x, num_threads=n)
                calls[f"f+b {n}"] = functools.partial(both, a, x, n)
            calls |= (others := peers(a, x))
            expected = la.scan(a[..., :64], x[..., :64], backend="reference")
            for name in ("forward 1", "forward 2", *others):
                assert la.testing.relative_error(calls[name]()[..., :64], expected) < 1e-5, name
            found = timing.interleaved(calls, options.rounds, options.seconds / (2 * len(SHAPES)))
            rate = 4 * x.nbytes / found["copy"]["cpu_ms"]
            quiet = min(x["quiet"] for x in found.values())
            row: dict[str, Any] = {"shape": list(shape), "factors": "constant" if constant else "of tokens",
                                   "copy GB/s": rate / 1e6, "quiet": quiet}  # fmt: skip
            row["copy two threads"] = found["copy"]["wall_ms"] / found["copy 2"]["wall_ms"]
            for kind, arrays in (("forward", 2 if constant else 3), ("f+b", 5 if constant else 8)):
                for n in (1, 2):
                    row[f"{kind} share {n}"] = arrays * x.nbytes / found[f"{kind} {n}"]["cpu_ms"] / rate
                row[f"{kind} two threads"] = found[f"{kind} 1"]["wall_ms"] / found[f"{kind} 2"]["wall_ms"]
            for name in others:
                row[f"{name} / forward"] = found[name]["cpu_ms"] / found["forward 1"]["cpu_ms"]
            rows.append(row)
            print(record.cells(row), flush=True)
    if options.write:
        print(record.write("scans", record.rounded({"dtype": "float32", "rows": rows})))
    return 0
