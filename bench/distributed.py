"""Sequences over GPUs: la.distributed.run by NCCL, one process a GPU, against the plain call on one.

    python -m bench distributed [--results FOLDER] [--tokens N] [--heads N] [--seconds N]

First the bits of one, two, ... GPUs are compared, with segments, and the results with those of the plain call. Then,
for each number of GPUs: strong scaling, N tokens shared out, and weak scaling, N tokens a GPU. Times are medians over
calls that all ranks begin together, of the slowest rank, host time included. An exchange of as many bytes as the call
sends is timed alone, which gives its share of the call. Last, a rank ends, and the others' error is timed.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import linattn_np as la
from bench.cuda import report
from linattn_np.distributed import nccl

FUNCTIONS = ("simple_gla", "gated_delta_rule", "kda", "selective_scan")
WIDTH, STATES = 128, 16  # of a head; of a channel of the scan
SEGMENT, SEGMENTS = 1024, 8  # of the comparison of bits
REPEATS, WARM = 7, 2
TIMEOUT, SHORT = 60.0, 3.0  # seconds that a rank waits for another; when one ends


class Counting:
    """A communicator that counts what this rank sends."""

    def __init__(self, comm: Any):
        self.rank, self.size, self._comm, self.sent = comm.rank, comm.size, comm, list[int]()

    def all_gather(self, x: Any) -> Any:
        self.sent.append(int(x.nbytes))
        return self._comm.all_gather(x)

    def begin(self, x: Any) -> Any:
        self.sent.append(int(x.nbytes))
        return self._comm.begin(x)


def draw(cp: Any, fn: str, T: int, H: int, seed: int) -> tuple[dict[str, Any], Any]:
    """(bfloat16 arrays of a call on (1, T, H, 128), gradient of the outputs): unit q and k, log decays to -0.1.

    The scan has as many channels, with steps to 0.1.
    """
    import ml_dtypes

    rng = cp.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape or (1, T, H, WIDTH), dtype=np.float32)

    if fn == "selective_scan":
        D = H * WIDTH
        rows = {"x": normal(1, T, D), "B": normal(1, T, STATES), "C": normal(1, T, STATES)}
        found = {n: y.astype(ml_dtypes.bfloat16) for n, y in rows.items()}
        found |= {"dt": 0.1 * rng.random((1, T, D), dtype=np.float32), "A": -cp.exp(normal(D, STATES))}
        return found, normal(1, T, D).astype(ml_dtypes.bfloat16)

    def unit() -> Any:
        x = normal()
        x /= cp.linalg.norm(x, axis=-1, keepdims=True)
        return x.astype(ml_dtypes.bfloat16)

    arrays = {"q": unit(), "k": unit(), "v": normal().astype(ml_dtypes.bfloat16)}
    shape = (1, T, H, WIDTH) if fn == "kda" else (1, T, H)
    arrays["g"] = -0.1 * rng.random(shape, dtype=np.float32)
    if fn != "simple_gla":
        arrays["beta"] = rng.random((1, T, H), dtype=np.float32)
    return arrays, normal().astype(ml_dtypes.bfloat16)


def tokens(x: Any, start: int, stop: int) -> Any:
    """A copy of these tokens; an array without tokens as it is."""
    return x[:, start:stop].copy() if x.ndim > 2 else x


def forward(fn: Any, arrays: dict[str, Any], **options: Any) -> Any:
    return la.distributed.run(fn, **arrays, **options) if options else fn(**arrays)


def both(fn: Any, arrays: dict[str, Any], dout: Any, **options: Any) -> Any:
    """(outputs, gradients)."""
    given = (la.distributed.run, fn) if options else (fn,)
    out, pullback = la.vjp(*given, **arrays, **options)
    return out, pullback(dout)


# what ranks measure


def same_bits(cp: Any, name: str, comm: Any, H: int) -> dict[str, Any]:
    """Whether this rank's outputs and gradients have the bits of one rank, with segments, and the largest error against
    the plain call, with segments or without.
    """
    fn, T = getattr(la, name), SEGMENT * SEGMENTS
    arrays, dout = draw(cp, name, T, H, seed=3)
    n = T // comm.size
    own = comm.rank * n, (comm.rank + 1) * n
    alone = la.distributed.Threads.of(1)[0]
    one = both(fn, arrays, dout, comm=alone, segment=SEGMENT)
    mine = {k: tokens(x, *own) for k, x in arrays.items()}
    many = both(fn, mine, tokens(dout, *own), comm=comm, segment=SEGMENT)
    without = both(fn, mine, tokens(dout, *own), comm=comm)
    plain = both(fn, arrays, dout)
    pairs = [(many[0], one[0], plain[0])] + [
        (a, b, c) for a, b, c in zip(many[1], one[1], plain[1], strict=True) if a is not None and a.ndim > 2
    ]
    free = [(without[0], plain[0])] + [
        (a, c) for a, c in zip(without[1], plain[1], strict=True) if a is not None and a.ndim > 2
    ]
    equal = all(bool(cp.array_equal(a.view(np.uint8), tokens(b, *own).view(np.uint8))) for a, b, _ in pairs)
    both_ways = [(a, c) for a, _, c in pairs] + free
    return {"bits_equal": equal, "largest_error": max(error(cp, a, tokens(c, *own)) for a, c in both_ways)}


def error(cp: Any, x: Any, wanted: Any) -> float:
    """Largest difference, relative to the largest number."""
    x, wanted = x.astype(np.float32), wanted.astype(np.float32)
    return float(cp.abs(x - wanted).max() / cp.abs(wanted).max())


def call_ms(cp: Any, comm: Any, call: Callable[[], Any]) -> float:
    """Milliseconds of a call that all ranks begin together, of the slowest rank."""
    times = []
    for n in range(WARM + REPEATS):
        comm.all_gather(cp.zeros(1, np.float32))
        cp.cuda.Device().synchronize()
        began = time.perf_counter()
        call()
        cp.cuda.Device().synchronize()
        if n >= WARM:
            times.append((time.perf_counter() - began) * 1e3)
    return float(comm.all_gather(cp.asarray([statistics.median(times)])).max())


def measured(cp: Any, fn: Any, comm: Any, arrays: dict[str, Any], dout: Any) -> dict[str, Any]:
    """Times and bytes of a call on these tokens of this rank."""
    counting, row = Counting(comm), {"tokens_a_gpu": int(dout.shape[1])}
    calls = {"forward": functools.partial(forward, fn, arrays), "both": functools.partial(both, fn, arrays, dout)}
    for what, call in calls.items():
        counting.sent.clear()
        call(comm=counting)
        sent = list(counting.sent)
        ms = call_ms(cp, comm, functools.partial(call, comm=comm))
        buffers = [cp.zeros(size // 4, np.float32) for size in sent]
        exchange = sum(call_ms(cp, comm, functools.partial(comm.all_gather, x)) for x in buffers)
        row[what] = {"ms": ms, "bytes_sent": sum(sent), "exchange_ms": exchange, "share_of_exchange": exchange / ms}
    return row


def rank_main(rank: int, size: int, ids: dict[Any, Any], folder: str, T: int, H: int, until: float) -> None:
    """One GPU of `size`, which measure in groups of fewer, too."""
    import cupy as cp

    cp.cuda.Device(rank).use()
    comms = {n: la.distributed.NCCL(rank, n, ids[n], timeout=TIMEOUT) for n in groups(size) if rank < n}
    result = report.device(cp) | {"gpus": size, "heads": H, "K": WIDTH, "V": WIDTH, "dtype": "bfloat16", "rows": []}
    for name in FUNCTIONS:
        row = of_function(cp, name, comms, T, H, rank)
        if rank == 0:
            result["rows"].append(row)
            sys.stdout.write(f"{report.write(Path(folder), 'distributed', result)}: {name}\n")
            sys.stdout.flush()
        cp.get_default_memory_pool().free_all_blocks()
        if bool(comms[size].all_gather(cp.asarray([time.time() > until], np.uint8)).any()):
            break
    if size > 1:
        found = rank_that_ends(cp, rank, size, ids["last"])
        if rank == 0:
            report.write(Path(folder), "distributed", result | {"rank_that_ends": found})
    os._exit(0)  # communicators with ranks that are gone are not taken down


def of_function(cp: Any, name: str, comms: dict[int, Any], T: int, H: int, rank: int) -> dict[str, Any]:
    """Bits, errors and times of a function."""
    fn, whole = getattr(la, name), comms[max(comms)]
    row: dict[str, Any] = {"function": name, "tokens": T, "bits_equal": {}, "largest_error": {}, "scaling": {}}
    for n, comm in comms.items():
        found = same_bits(cp, name, comm, 4)
        every = comm.all_gather(cp.asarray([found["bits_equal"]], np.uint8))
        row["bits_equal"][str(n)], row["largest_error"][str(n)] = bool(every.all()), found["largest_error"]
    arrays, dout = draw(cp, name, T, H, seed=rank)
    row["plain_ms"] = {
        "forward": call_ms(cp, whole, functools.partial(forward, fn, arrays)),
        "both": call_ms(cp, whole, functools.partial(both, fn, arrays, dout)),
    }
    for n, comm in comms.items():
        own = {k: tokens(x, 0, T // n) for k, x in arrays.items()}
        row["scaling"][str(n)] = {
            "strong": measured(cp, fn, comm, own, tokens(dout, 0, T // n)),
            "weak": measured(cp, fn, comm, arrays, dout),
        }
    return summed_up(row)


def rank_that_ends(cp: Any, rank: int, size: int, unique_id: Any) -> dict[str, Any]:
    """What the other ranks see of one that ends without a word."""
    comm = la.distributed.NCCL(rank, size, unique_id, timeout=SHORT)
    comm.all_gather(cp.zeros(1, np.float32))
    if rank == size - 1:
        os._exit(0)
    began, told = time.perf_counter(), None
    try:
        comm.all_gather(cp.zeros(1 << 20, np.float32))
    except la.distributed.RankError as gone:
        told = str(gone)
    return {"error": told, "seconds": time.perf_counter() - began, "limit": SHORT}


def summed_up(row: dict[str, Any]) -> dict[str, Any]:
    """With speedups over the plain call on one GPU: strong, and weak as the share of the ideal."""
    for each in row["scaling"].values():
        for what, ms in row["plain_ms"].items():
            each["strong"][what]["speedup"] = ms / each["strong"][what]["ms"]
            each["weak"][what]["efficiency"] = ms / each["weak"][what]["ms"]
    return row


def groups(size: int) -> list[int]:
    """Numbers of GPUs to measure."""
    return [n for n in (2, 4, 8) if n < size] + [size]


def main(argv: list[str]) -> int:
    parser = report.parser("distributed", __doc__, peers=False)
    parser.add_argument("--tokens", type=int, default=1 << 18, help="of one sequence")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=140.0, help="no new function after two thirds of it")
    args = parser.parse_args(argv)
    import cupy as cp

    began, size = time.time(), cp.cuda.runtime.getDeviceCount()
    ids = {n: nccl.unique_id() for n in (*groups(size), "last")}  # this process must live while ranks join
    given = (size, ids, str(args.results), args.tokens, args.heads, began + args.seconds * 2 / 3)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(rank, *given)) for rank in range(size)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(max(began + args.seconds - time.time(), 0.1))
    late = [one for one in ranks if one.is_alive()]
    for one in late:
        one.kill()
    return int(bool(late) or any(one.exitcode for one in ranks))
