"""The pieces of linattn_np.nn on a CPU: their share of the rate at which NumPy copies the same bytes.

    python -m bench pieces [--rounds 15] [--only short_conv] [--write]

float32, arrays of 16 to 25 MB. The bytes of a call are those that it must read and write once: a forward of one array
has those of one copy. A round times a copy, then each call once; reported are the shortest times of all rounds, forward
and forward with the pullback: CPU time of calls on one thread, wall time on two, which other processes lengthen. Beside
the convolution stands torch's, on one thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from bench import record

TOKENS, CHANNELS, HEAD, WORDS = 4096, 1536, 128, 8192


class Case(NamedTuple):
    """A call, the arrays that its forward and its backward must move, peers by name."""

    name: str
    arrays: tuple[Any, ...]
    options: dict[str, Any]
    moved: tuple[int, int]
    peers: dict[str, Callable[[], Any]] = {}  # noqa: RUF012


def cases() -> list[Case]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    x, weight = normal(TOKENS, CHANNELS), normal(CHANNELS, 4)
    heads, gate, scale = normal(TOKENS * 8, HEAD), normal(TOKENS * 8, HEAD), normal(HEAD)
    rows, labels = normal(512, WORDS), rng.integers(0, WORDS, 512)
    tokens = normal(1, TOKENS, 12, HEAD)
    found = [Case("short_conv", (x, weight), {"activation": "silu"}, (2, 3), convolution(x, weight)),
             Case("rms_norm", (heads, scale), {}, (2, 3)), Case("layer_norm", (heads, scale, scale), {}, (2, 3)),
             Case("l2_norm", (heads,), {}, (2, 3)), Case("gated_norm", (heads, gate, scale), {}, (3, 5)),
             Case("softmax", (heads,), {}, (2, 3)), Case("rotary", (tokens,), {}, (2, 2)),
             Case("swiglu", (heads, gate), {}, (3, 5)), Case("cross_entropy", (rows, labels), {}, (1, 2)),
             Case("token_shift", (x, scale[:1] * np.ones(CHANNELS, np.float32)), {}, (2, 3))]  # fmt: skip
    return found + [Case(n, (heads,), {}, (2, 3)) for n in ("sigmoid", "silu", "softplus", "gelu", "squared_relu")]


def convolution(x: np.ndarray, weight: np.ndarray) -> dict[str, Callable[[], Any]]:
    """torch's convolution and silu, of its own memory order."""
    try:
        import torch
        import torch.nn.functional as F
    except ImportError:
        return {}
    torch.set_num_threads(1)
    y, w = torch.from_numpy(x.T.copy())[None], torch.from_numpy(weight)[:, None]
    with torch.no_grad():
        return {"torch": lambda: F.silu(F.conv1d(y, w, padding=3, groups=len(w))[..., : y.shape[-1]])}


def timed(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start


def measured(case: Case, rounds: int) -> dict[str, Any]:
    """Shares of the copy rate."""
    fn, first = getattr(la.nn, case.name), case.arrays[0]
    other, calls = np.empty_like(first), dict[str, Callable[[], Any]]()
    for threads in (1, 2):
        run = lambda threads=threads: fn(*case.arrays, **case.options, num_threads=threads)  # noqa: E731
        y, pullback = la.vjp(fn, *case.arrays, **case.options, num_threads=threads)
        calls[f"forward, {threads}"] = run
        calls[f"backward, {threads}"] = functools.partial(pullback, np.ones_like(y))
    calls |= case.peers
    if case.name in ("sigmoid", "silu", "softplus"):
        calls["np.exp"] = lambda: np.exp(first, out=other)
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {n: [] for n in ("copy", *calls)}
    for _ in range(rounds):
        times["copy"].append(timed(lambda: np.copyto(other, first), time.thread_time))
        for name, call in calls.items():
            times[name].append(timed(call, time.perf_counter if name.endswith("2") else time.thread_time))
    ms = {n: min(each) * 1e3 for n, each in times.items()}
    forward, backward = (n / 2 * ms["copy"] for n in case.moved)
    row: dict[str, Any] = {"piece": case.name, "copy GB/s": 2 * first.nbytes / ms["copy"] / 1e6}
    for threads in (1, 2):
        f, b = ms[f"forward, {threads}"], ms[f"backward, {threads}"]
        row |= {f"forward, {threads}": forward / f, f"with gradients, {threads}": (forward + backward) / (f + b)}
    if "np.exp" in ms:
        row |= {f"over np.exp, {n}": ms["np.exp"] / ms[f"forward, {n}"] for n in (1, 2)}
    return row | {n: forward / ms[n] for n in case.peers}


def main(arguments: list[str]) -> int:
    parser = record.parser("pieces", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    options, rows = parser.parse_args(arguments), []
    for case in cases():
        if options.only in ("", case.name):
            rows.append(measured(case, options.rounds))
            print(record.cells(rows[-1]), flush=True)
    if options.write:
        print(record.write("pieces", {"dtype": "float32", "rows": rows}))
    return 0
