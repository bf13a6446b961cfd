"""The JAX bridge on a GPU: a jitted call against the CuPy call, and against a jitted operation that does nothing.

    python -m bench jax_bridge --backend cuda [--json FILE] [--write]

The gated delta rule, bfloat16 with float32 gates, forward, and forward with backward. Three numbers a call, in
microseconds, medians in turn: `queued`, until one of several calls returns; `finished`, the same with the wait for all
of them; `waiting`, one call until its result is there. Beside the jitted call and the CuPy call:

    empty   a jitted buffer_callback with the same arrays and results whose function returns at once
    spin    one kernel of a fixed duration, by CuPy and by a jitted buffer_callback: what JAX's own wait takes longer
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

SHAPES = ((1, 64, 4, 128), (1, 2048, 8, 128), (1, 4096, 16, 128))
QUEUE, ROUNDS = 20, 30
KINDS = ("queued", "finished", "waiting")
SPIN = r"""extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < ns);
}"""
Call = tuple[Callable[[], Any], Callable[[Any], Any]]  # the call, the wait for its result


def draw(np: Any, bfloat16: Any, shape: tuple[int, int, int, int]) -> list[Any]:
    """q, k, v, g, beta on the host; unit keys."""
    B, T, H, _ = shape
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, *shape)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gates = -rng.uniform(0, 0.1, (B, T, H)), rng.uniform(0, 1, (B, T, H))
    return [*(x.astype(bfloat16) for x in (q, k, v)), *(x.astype(np.float32) for x in gates)]


def empty(jax: Any, results: list[Any]) -> Callable[..., Any]:
    """A jitted operation that leaves its results as they are."""
    from jax.experimental.buffer_callback import buffer_callback

    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results)
    return jax.jit(lambda *given: buffer_callback(lambda context, out, *given: None, shapes,
                                                  command_buffer_compatible=True)(*given))  # fmt: skip


def calls_of(la: Any, cp: Any, jax: Any, shape: tuple[int, int, int, int]) -> dict[str, dict[str, Call]]:
    """Calls by name."""
    import ml_dtypes
    import numpy as np

    fn, given = la.gated_delta_rule, draw(np, ml_dtypes.bfloat16, shape)
    theirs, mine = [cp.asarray(x) for x in given], [jax.numpy.asarray(x) for x in given]
    dout, cdout, wait = mine[2] + 1, theirs[2] + theirs[2], cp.cuda.Device().synchronize

    def gradients(dout: Any, *x: Any) -> Any:
        out, vjp = jax.vjp(fn, *x)
        return out, vjp(dout)

    def both() -> Any:
        out, pullback = la.vjp(fn, *theirs)
        return out, pullback(cdout)

    forward, backward = jax.jit(fn), jax.jit(gradients)
    nothing, nothing_back = empty(jax, [mine[2]]), empty(jax, [mine[2], *mine])
    ready = jax.block_until_ready
    return {"forward": {"cupy": (lambda: fn(*theirs), lambda _: wait()), "jax": (lambda: forward(*mine), ready),
                        "empty": (lambda: nothing(*mine), ready)},
            "forward and backward": {"cupy": (both, lambda _: wait()), "jax": (lambda: backward(dout, *mine), ready),
                                     "empty": (lambda: nothing_back(*mine), ready)}}  # fmt: skip


def spins(cp: Any, jax: Any, microseconds: int) -> dict[str, Call]:
    """A kernel that does nothing for a while."""
    from jax.experimental.buffer_callback import buffer_callback

    from linattn_np.bridges.device_programs import current

    kernel = cp.RawKernel(SPIN, "spin")

    def launched(context: Any, out: Any, x: Any) -> None:
        with current(0, context.stream):
            kernel((1,), (1,), (cp.uint64(1000 * microseconds),))

    one = jax.numpy.zeros(1)
    jitted = jax.jit(lambda x: buffer_callback(launched, jax.ShapeDtypeStruct((1,), "float32"))(x))
    return {"cupy": (lambda: kernel((1,), (1,), (cp.uint64(1000 * microseconds),)),
                     lambda _: cp.cuda.Device().synchronize()),
            "jax": (lambda: jitted(one), jax.block_until_ready)}  # fmt: skip


def host(calls: dict[str, Call]) -> dict[str, dict[str, float]]:
    """Median microseconds of each call, and how much longer the jitted one takes."""
    times: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in calls}
    for call, ready in calls.values():
        for _ in range(5):
            ready(call())
    for _ in range(ROUNDS):
        for name, (call, ready) in calls.items():
            marks = [time.perf_counter_ns()]
            for _ in range(QUEUE):
                result = call()
            marks.append(time.perf_counter_ns())
            ready(result)
            marks.append(time.perf_counter_ns())
            ready(call())
            marks.append(time.perf_counter_ns())
            spans = (marks[1] - marks[0]) / QUEUE, (marks[2] - marks[0]) / QUEUE, marks[3] - marks[2]
            for kind, span in zip(KINDS, spans, strict=True):
                times[name][kind].append(span / 1e3)
    found = {name: {kind: statistics.median(x) for kind, x in each.items()} for name, each in times.items()}
    return found | {f"jax less {other}": {kind: found["jax"][kind] - found[other][kind] for kind in KINDS}
                    for other in found if other != "jax"}  # fmt: skip


def measure() -> dict[str, Any]:
    """All measurements."""
    import cupy as cp
    import jax

    import linattn_np as la

    found = {f"{name} {shape}": host(calls) for shape in SHAPES
             for name, calls in calls_of(la, cp, jax, shape).items()}  # fmt: skip
    return {"us": found | {f"spin {n} us": host(spins(cp, jax, n)) for n in (10, 100, 300)}}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench jax_bridge --backend cuda",
                                     description=(__doc__ or "").partition("\n")[0])  # fmt: skip
    parser.add_argument("--json", help="write the result as JSON to this file too")
    parser.add_argument("--write", action="store_true", help="write the result as JSON to bench/results/")
    args = parser.parse_args(argv)
    from bench import record

    found = record.rounded(measure())
    print(json.dumps(found, indent=1))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)
    if args.write:
        print(record.write("cuda_jax_bridge", found))
    return 0
