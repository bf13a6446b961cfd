"""The pieces of linattn_np.nn on a CPU: their share of the rate at which NumPy copies the same bytes.

    python -m bench pieces [--rounds 15] [--threads 1 2] [--only short_conv] [--write]

float32, arrays of 16 to 25 MB. The bytes of a call are those that it must read and write once: a forward of one array
has those of one copy. A round times a copy, then each call once. The shortest times of all rounds count, of the forward
and of the forward with the pullback: CPU time of calls on one thread, wall time on two, which other processes lengthen.
Forward calls of PyTorch, of SciPy and of the Python forms of transformers on one thread stand beside them, as shares of
the same rate.
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
    """A call, and the arrays that its forward and its backward must move."""

    name: str
    arrays: tuple[Any, ...]
    options: dict[str, Any]
    moved: tuple[int, int]


def cases() -> list[Case]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    x, weight = normal(TOKENS, CHANNELS), normal(CHANNELS, 4)
    heads, gate, scale = normal(TOKENS * 8, HEAD), normal(TOKENS * 8, HEAD), normal(HEAD)
    rows, labels = normal(512, WORDS), rng.integers(0, WORDS, 512)
    tokens = normal(1, TOKENS, 12, HEAD)
    found = [Case("short_conv", (x, weight), {"activation": "silu"}, (2, 3)),
             Case("rms_norm", (heads, scale), {}, (2, 3)), Case("layer_norm", (heads, scale, scale), {}, (2, 3)),
             Case("l2_norm", (heads,), {}, (2, 3)), Case("gated_norm", (heads, gate, scale), {}, (3, 5)),
             Case("softmax", (heads,), {}, (2, 3)), Case("rotary", (tokens,), {}, (2, 2)),
             Case("swiglu", (heads, gate), {}, (3, 5)), Case("cross_entropy", (rows, labels), {}, (1, 2)),
             Case("token_shift", (x, scale[:1] * np.ones(CHANNELS, np.float32)), {}, (2, 3))]  # fmt: skip
    return found + [Case(n, (heads,), {}, (2, 3)) for n in ("sigmoid", "silu", "softplus", "gelu", "squared_relu")]


def peers(case: Case) -> dict[str, Callable[[], Any]]:
    """The same forward in other libraries, by their names."""
    found, x = dict[str, Callable[[], Any]](), case.arrays[0]
    try:
        import scipy.special

        if case.name in ("sigmoid", "softmax"):
            fn = scipy.special.expit if case.name == "sigmoid" else functools.partial(scipy.special.softmax, axis=-1)
            found["SciPy"] = lambda: fn(x)
    except ImportError:
        pass
    try:
        import torch
        import torch.nn.functional as F
    except ImportError:
        return found
    torch.set_num_threads(1)
    own = [torch.from_numpy(y) for y in case.arrays]
    y, *more = own
    calls: dict[str, Callable[[], Any]] = {
        "rms_norm": lambda: F.rms_norm(y, (HEAD,), *more), "layer_norm": lambda: F.layer_norm(y, (HEAD,), *more),
        "l2_norm": lambda: F.normalize(y, dim=-1), "softmax": lambda: F.softmax(y, -1),
        "swiglu": lambda: y * F.silu(more[0]), "cross_entropy": lambda: F.cross_entropy(y, more[0]),
        "sigmoid": lambda: torch.sigmoid(y), "silu": lambda: F.silu(y), "softplus": lambda: F.softplus(y),
        "gelu": lambda: F.gelu(y), "squared_relu": lambda: F.relu(y).square(),
    }  # fmt: skip
    if case.name == "short_conv":  # of its own memory order
        columns, taps = y.T.contiguous()[None], more[0][:, None]
        calls["short_conv"] = lambda: F.silu(F.conv1d(columns, taps, padding=3, groups=len(taps))[..., : len(y)])
    if case.name in calls:
        found["torch"] = calls[case.name]
    if case.name == "gated_norm":
        try:
            from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
        except ImportError:
            return found
        module = Qwen3NextRMSNormGated(HEAD)
        found["transformers"] = lambda: module(y, more[0])
    return {n: torch.no_grad()(call) for n, call in found.items()}


def timed(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start


def measured(case: Case, rounds: int, counts: list[int]) -> dict[str, Any]:
    """Shares of the copy rate on so many threads."""
    fn, first = getattr(la.nn, case.name), case.arrays[0]
    other, calls = np.empty_like(first), dict[str, Callable[[], Any]]()
    for threads in counts:
        run = lambda threads=threads: fn(*case.arrays, **case.options, num_threads=threads)  # noqa: E731
        y, pullback = la.vjp(fn, *case.arrays, **case.options, num_threads=threads)
        calls[f"forward, {threads}"] = run
        calls[f"backward, {threads}"] = functools.partial(pullback, np.ones_like(y))
    others = peers(case)
    calls |= others
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
    for threads in counts:
        f, b = ms[f"forward, {threads}"], ms[f"backward, {threads}"]
        row |= {f"forward, {threads}": forward / f, f"with gradients, {threads}": (forward + backward) / (f + b)}
    if "np.exp" in ms:
        row |= {f"over np.exp, {n}": ms["np.exp"] / ms[f"forward, {n}"] for n in counts}
    return record.rounded(row | {n: forward / ms[n] for n in others})


def main(arguments: list[str]) -> int:
    parser = record.parser("pieces", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--only", default="")
    options, rows = parser.parse_args(arguments), []
    for case in cases():
        if options.only in ("", case.name):
            rows.append(measured(case, options.rounds, options.threads))
            print(record.cells(rows[-1]), flush=True)
    if options.write:
        print(record.write("pieces", {"dtype": "float32", "rows": rows}))
    return 0
