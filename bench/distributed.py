"""Sequences over GPUs: la.distributed.run by NCCL, one process a GPU, against the plain call on one.

    python -m bench distributed [--results FOLDER] [--part NAME ...] [--seconds N]

    bits      outputs and gradients of 1, 2, ... GPUs compared, with segments, and with those of the plain call
    weak      32 heads, 262,144 tokens a GPU; efficiency: plain ms / ms
    strong    8 heads, 1,048,576 tokens on 1, 2, ... GPUs; efficiency: plain ms / (GPUs ms)
    fla       the same of FLA's context parallelism by torch.distributed, where it has one
    training  steps of la.train.fit with two batches, on one GPU and shared out
    killed    a rank kills itself between forward and backward: what the others raise, and when; killed_first: in the
              first call of the process

Times are medians of the slowest rank. ms: of eight calls one after another, as layers make them; alone: of one call
that all ranks begin together, from its first line in Python to the last result. An exchange of as many bytes as a call
sends is timed alone, which gives its share of the call. Each part has processes and a time limit of its own; what it
has measured until then is in the record.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from bench.cuda import peers, report, training
from linattn_np.distributed import nccl
from linattn_np.train.gradient import ALONE

FUNCTIONS = ("simple_gla", "gated_delta_rule", "kda", "selective_scan")
WIDTH, STATES = 128, 16  # of a head; of a channel of the scan
SEGMENT, BITS = 1024, 8192  # tokens of the comparison of bits
REPEATS, CALLS, WARM = 5, 8, 2
TIMEOUT, SHORT = 30.0, 10.0  # seconds that a rank waits for another; for the one that is killed
SIZES = {"weak": (1 << 18, 32), "strong": (1 << 20, 8)}  # tokens of the plain call, heads
STEPS = 8  # of training, after as many


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


# calls


def forward(fn: Any, arrays: dict[str, Any], dout: Any = None, **options: Any) -> Any:
    return la.distributed.run(fn, **arrays, **options) if options else fn(**arrays)


def both(fn: Any, arrays: dict[str, Any], dout: Any, **options: Any) -> Any:
    """(outputs, gradients)."""
    given = (la.distributed.run, fn) if options else (fn,)
    out, pullback = la.vjp(*given, **arrays, **options)
    return out, pullback(dout)


CALLED = {"forward": forward, "both": both}


class Rank(NamedTuple):
    """One GPU of `size`.   comms: of the groups that it is in, by size; tell(key, value): to the record, of rank 0."""

    cp: Any
    rank: int
    size: int
    comms: dict[int, Any]
    tell: Callable[[str, Any], None]
    folder: str

    @property
    def whole(self) -> Any:
        return self.comms[self.size]

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """A case whose failure is told, with the memory of the GPU free again."""
        try:
            yield
        except Exception as problem:
            self.tell("errors", {name: f"{type(problem).__name__}: {problem}"[:400]})
        self.cp.get_default_memory_pool().free_all_blocks()


# times


def call_ms(cp: Any, comm: Any, call: Callable[[], Any], calls: int = CALLS) -> float:
    """Milliseconds of each of so many calls one after another that all ranks begin together, of the slowest rank."""
    times = []
    for n in range(WARM + REPEATS):
        comm.all_gather(cp.zeros(1, np.float32))
        cp.cuda.Device().synchronize()
        began = time.perf_counter()
        for _ in range(calls if n >= WARM else 1):
            call()
        cp.cuda.Device().synchronize()
        if n >= WARM:
            times.append((time.perf_counter() - began) * 1e3 / calls)
    return float(comm.all_gather(cp.asarray([statistics.median(times)])).max())


def timed(cp: Any, comm: Any, call: Callable[[], Any]) -> dict[str, float]:
    return {"ms": call_ms(cp, comm, call), "alone ms": call_ms(cp, comm, call, 1)}


def row_of(head: dict[str, Any], plain: dict[str, float], found: dict[str, float], share: int) -> dict[str, Any]:
    """A row with efficiencies.   share: in how many parts the work of the plain call was cut."""
    return head | {
        "plain ms": plain["ms"], "ms": found["ms"], "efficiency": plain["ms"] / (share * found["ms"]),
        "alone ms": found["alone ms"], "alone efficiency": plain["alone ms"] / (share * found["alone ms"]),
    }  # fmt: skip


def same_bits(cp: Any, name: str, comm: Any, H: int) -> dict[str, Any]:
    """Whether this rank's outputs and gradients have the bits of one rank, with segments, and the largest error against
    the plain call, with segments or without.
    """
    fn, T = getattr(la, name), BITS
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


# parts: what each rank does


def bits(own: Rank) -> None:
    for name in FUNCTIONS:
        with own.case(f"bits {name}"):
            equal, errors = {}, {}
            for n, comm in own.comms.items():
                found = same_bits(own.cp, name, comm, 4)
                every = comm.all_gather(own.cp.asarray([found["bits_equal"]], np.uint8))
                equal[str(n)], errors[str(n)] = bool(every.all()), found["largest_error"]
            own.tell("bits_equal", {name: equal})
            own.tell("largest_error", {name: errors})


def scaling(own: Rank, kind: str) -> None:
    cp, (T, H) = own.cp, SIZES[kind]
    for name in FUNCTIONS:
        with own.case(f"{kind} {name}"):
            fn, (arrays, dout) = getattr(la, name), draw(cp, name, T, H, seed=own.rank)
            for what, call in CALLED.items():
                plain = timed(cp, own.whole, functools.partial(call, fn, arrays, dout))
                for n, comm in own.comms.items():
                    share = n if kind == "strong" else 1
                    mine = {k: tokens(x, 0, T // share) for k, x in arrays.items()}, tokens(dout, 0, T // share)
                    head = {"function": name, "by": "linattn_np", "scaling": kind, "what": what, "gpus": n,
                            "tokens a GPU": T // share, "heads": H}  # fmt: skip
                    row = row_of(head, plain, timed(cp, comm, functools.partial(call, fn, *mine, comm=comm)), share)
                    own.tell("rows", row | sent_by(cp, comm, functools.partial(call, fn, *mine), row["ms"]))
                    del mine


def sent_by(cp: Any, comm: Any, call: Callable[..., Any], ms: float) -> dict[str, Any]:
    """What a call sends, and the time of exchanges of as many bytes."""
    counting = Counting(comm)
    call(comm=counting)
    buffers = [cp.zeros(size // 4, np.float32) for size in counting.sent]
    exchange = sum(call_ms(cp, comm, functools.partial(comm.all_gather, x), 1) for x in buffers)
    return {"bytes sent": sum(counting.sent), "exchange ms": exchange, "share of exchange": exchange / ms}


def fla(own: Rank) -> None:
    """FLA's functions that take a cp_context, their gradients by torch's autograd."""
    import torch
    import torch.distributed as dist

    os.environ["LINATTN_BENCH_FEW"] = "1"
    by, note = peers.fla()
    from fla import ops
    from fla.ops.cp import build_cp_context

    torch.cuda.set_device(own.rank)
    dist.init_process_group("nccl", init_method=f"file://{own.folder}/ranks", rank=own.rank, world_size=own.size)
    own.tell("fla", {"versions": f"{by}, {note}", "torch": str(torch.__version__)})
    chosen = {}
    for name in FUNCTIONS:
        fn = getattr(ops, f"chunk_{name}", None)
        if fn is None or "cp_context" not in inspect.signature(fn).parameters:
            own.tell("fla", {name: "no function" if fn is None else "no context parallelism"})
        else:
            chosen[name] = fn

    def over_ranks(T: int) -> dict[str, Any]:
        offsets = torch.tensor([0, T], dtype=torch.int32)
        return {"cp_context": build_cp_context(offsets.cuda(), dist.group.WORLD, cu_seqlens_cpu=offsets)}

    def call(fn: Any, what: str, options: dict[str, Any], arrays: dict[str, Any], dout: Any) -> Any:
        *given, d = peers.tensors(torch, [*arrays.values(), dout])
        if what == "forward":
            with torch.no_grad():
                return fn(*given, **options)[0]
        given = [x.detach().requires_grad_() for x in given]
        out = fn(*given, **options)[0]
        return [out, *torch.autograd.grad(out, given, d)]

    for name, what, kind in itertools.product(chosen, CALLED, SIZES):  # each is told before the next one compiles
        with own.case(f"fla {kind} {name} {what}"):
            (T, H), fn = SIZES[kind], chosen[name]
            if kind == "weak":
                largest = of_fla(own, name, what, functools.partial(call, fn, what, over_ranks(BITS)), H)
                own.tell("fla", {f"{name} {what} largest error": largest})
            share = own.size if kind == "strong" else 1
            arrays, dout = draw(own.cp, name, T, H, seed=own.rank)
            mine = {k: tokens(x, 0, T // share) for k, x in arrays.items()}, tokens(dout, 0, T // share)
            plain = timed(own.cp, own.whole, functools.partial(call, fn, what, {}, arrays, dout))
            over = functools.partial(call, fn, what, over_ranks(T // share * own.size), *mine)
            head = {"function": name, "by": by, "scaling": kind, "what": what, "gpus": own.size,
                    "tokens a GPU": T // share, "heads": H}  # fmt: skip
            own.tell("rows", row_of(head, plain, timed(own.cp, own.whole, over), share))
            del arrays, dout, mine, over
        torch.cuda.empty_cache()


def of_fla(own: Rank, name: str, what: str, call: Callable[..., Any], H: int) -> float:
    """The largest error of its outputs, and gradients, over ranks, against our plain call."""
    arrays, dout = draw(own.cp, name, BITS, H, seed=3)
    part = own.rank * BITS // own.size, (own.rank + 1) * BITS // own.size
    found = call({k: tokens(x, *part) for k, x in arrays.items()}, tokens(dout, *part))
    found = [found] if what == "forward" else found
    out, grads = both(getattr(la, name), arrays, dout)
    wanted = [out, *(getattr(grads, n) for n in arrays)][: len(found)]
    errors = [error(own.cp, own.cp.from_dlpack(x.detach().float()), tokens(y, *part))
              for x, y in zip(found, wanted, strict=True)]  # fmt: skip
    return float(own.whole.all_gather(own.cp.asarray([max(errors)])).max())


def trained(own: Rank) -> None:
    """Two batches a step: on one GPU, and shared out."""
    for case in training.CASES:
        with own.case(f"training {case.name}"):
            model, batch = case.model, training.batches(case)
            start = la.train.Run.start(model.loss, dtype=training.DTYPES["bfloat16"])

            def fit(comm: Any, model: Any = model, batch: Any = batch, start: Any = start) -> tuple[float, Any]:
                """(milliseconds of a step, the run)."""
                began, run = list[float](), copy.deepcopy(start).to("cuda")

                def rate(step: int) -> float:
                    began.append(time.perf_counter())
                    return 1e-4

                la.train.fit(model.loss, run, batch, 2 * STEPS, rate, accumulate=own.size, bar=False, comm=comm)
                return 1e3 * statistics.median(np.diff(began)[STEPS:]), run

            ms, run = fit(ALONE)
            losses, alone = run.losses, run.params.vector.copy()
            del run
            over, run = fit(own.whole)
            sent = own.cp.zeros(model.loss.count + 1, np.float32)
            exchange = call_ms(own.cp, own.whole, functools.partial(own.whole.all_gather, sent), 1)
            params = run.params.vector.view(np.uint8)
            same = losses == run.losses and bool(own.cp.array_equal(alone.view(np.uint8), params))
            own.tell("training", {case.name: {
                "gpus": own.size, "parameters": model.loss.count, "tokens a step": own.size * case.B * case.T,
                "one GPU ms": ms, "ms": over, "efficiency": ms / (own.size * over), "bits_equal": same,
                "bytes sent": sent.nbytes, "exchange ms": exchange, "share of exchange": exchange / over}})  # fmt: skip
            del run, params, alone, sent


class Killing:
    """A communicator whose rank ends with the second exchange, the first one of the backward."""

    def __init__(self, comm: Any):
        self.rank, self.size, self._comm, self._left = comm.rank, comm.size, comm, 1

    def all_gather(self, x: Any) -> Any:
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return self._comm.all_gather(x)


def killed(own: Rank, before: int) -> None:
    """What the other ranks see of one that is killed between forward and backward, after so many other calls.

    The first call waits for an exchange at once, later ones launch kernels before.
    """
    arrays, dout = draw(own.cp, "simple_gla", SEGMENT, 4, seed=own.rank)
    for _ in range(before):
        both(la.simple_gla, arrays, dout, comm=own.whole)
    comm = Killing(own.whole) if own.rank == own.size - 1 else own.whole
    _, pullback = la.vjp(la.distributed.run, la.simple_gla, **arrays, comm=comm)
    began, told = time.perf_counter(), None
    try:
        pullback(dout)
    except la.distributed.RankError as gone:
        told = str(gone)
    seconds = time.perf_counter() - began
    own.tell("rank_killed", {f"after {before} calls": {"error": told, "seconds": seconds, "limit": SHORT}})


PARTS: dict[str, tuple[Callable[[Rank], None], float]] = {  # seconds
    "bits": (bits, 45.0),
    "weak": (functools.partial(scaling, kind="weak"), 60.0),
    "strong": (functools.partial(scaling, kind="strong"), 60.0),
    "fla": (fla, 300.0),
    "training": (trained, 45.0),
    "killed": (functools.partial(killed, before=2), 40.0),
    "killed_first": (functools.partial(killed, before=0), 40.0),
}


# processes


def rank_main(part: str, rank: int, size: int, ids: dict[int, Any], pipe: Any, folder: str) -> None:
    """One process of a part."""
    import cupy as cp

    cp.cuda.Device(rank).use()
    timeout = SHORT if part.startswith("killed") else TIMEOUT
    comms = {n: la.distributed.NCCL(rank, n, ids[n], timeout=timeout) for n in groups(size) if rank < n}
    PARTS[part][0](Rank(cp, rank, size, comms, lambda *told: pipe and pipe.send(told), folder))
    os._exit(0)  # communicators with ranks that are gone are not taken down


def told_by(part: str, size: int, seconds: float, folder: str) -> Iterator[tuple[str, Any]]:
    """What rank 0 of a part tells within its time; then its processes have ended."""
    context, until = multiprocessing.get_context("spawn"), time.monotonic() + seconds
    ids = {n: nccl.unique_id() for n in groups(size)}  # this process must live while ranks join
    answers, pipe = context.Pipe(duplex=False)
    given = (size, ids)
    ranks = [context.Process(target=rank_main, args=(part, rank, *given, None if rank else pipe, folder))
             for rank in range(size)]  # fmt: skip
    for one in ranks:
        one.start()
    pipe.close()
    with answers, contextlib.suppress(EOFError):
        while answers.poll(max(until - time.monotonic(), 0.0)):
            yield answers.recv()
    for one in ranks:
        one.join(max(min(until - time.monotonic(), 5.0), 0.1))
    late = [one for one in ranks if one.is_alive()]
    for one in late:
        one.kill()
        one.join()
    if late or ranks[0].exitcode:
        why = f"not done after {seconds:.0f} s" if late else f"rank 0 ended with status {ranks[0].exitcode}"
        yield "errors", {part: why}


def groups(size: int) -> list[int]:
    """Numbers of GPUs to measure."""
    return [n for n in (2, 4, 8) if n < size] + [size]


def main(argv: list[str]) -> int:
    parser = report.parser("distributed", __doc__, peers=False)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="what to measure; all by default")
    parser.add_argument("--seconds", type=float, default=150.0, help="of all parts (150)")
    args = parser.parse_args(argv)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast: a fault there stops the GPUs of others
    import cupy as cp

    until, size = time.monotonic() + args.seconds, cp.cuda.runtime.getDeviceCount()
    result: dict[str, Any] = report.device(cp) | {"gpus": size, "K": WIDTH, "V": WIDTH, "dtype": "bfloat16", "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        for part in args.part:
            began = time.monotonic()
            for key, value in told_by(part, size, min(PARTS[part][1], max(until - began, 1.0)), folder):
                if key == "rows":
                    result["rows"].append(value)
                else:
                    result.setdefault(key, {}).update(value)
                report.write(args.results, "distributed", result)
                sys.stdout.write(f"{key}: {json.dumps(value)}\n")
            sys.stdout.write(f"{part}: {time.monotonic() - began:.0f} s\n")
            sys.stdout.flush()
    return int("errors" in result)
