"""A StateLog on a CUDA device: a token, a flush, a tree and a chain of drafts, beside a token of `la.step`.

    python -m bench state_log --backend cuda [--results FOLDER] [--states KIND ...]

Gated delta rule, float32 tokens, H = 32, K = V = 128, logs of 16 tokens. A token is the mean of the 16 that are between
two flushes; with its share of a flush it is compared with `la.step` on a float32 state that is overwritten. Trees and
chains are 64 nodes. Times are those of CUDA graphs. The bytes are
those of the checkpoint, read (a flush: and written) once, of the tokens of the call, and of the entries of the log that
are read or written; their floor is the time that they take at the rate of a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import linattn_np as la
from bench.cuda import report, timing

B, DRAFTED, H, D, LENGTH, NODES = 256, 32, 32, 128, 16, 64
KINDS = ("float32", "float16", "int16", "int12", "int8")
ENTRY, TOKEN = 4 * (2 * D + 1), 4 * (4 * D + 2)  # bytes of k u g; of q k v out, g beta


def draw(cp: Any, rows: int, T: int) -> list[Any]:
    """(q, k, v, g, beta), keys of length 1."""
    rng = cp.random.default_rng(0)
    q, k, v = (rng.standard_normal((rows, T, H, D), dtype=np.float32) for _ in range(3))
    k /= cp.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = (rng.random((rows, T, H), dtype=np.float32) for _ in range(2))
    return [q, k, v, -0.1 * g, beta]


def log_of(cp: Any, kind: str, rows: int) -> tuple[Any, int]:
    """A log of random states, and the bytes of a state."""
    S = cp.random.default_rng(1).standard_normal((rows, H, D, D), dtype=np.float32)
    pool = la.pack_state(S, kind) if kind.startswith("int") else S.astype(kind)
    return la.StateLog(la.gated_delta_rule, pool, length=LENGTH), pool.nbytes // (rows * H)


def tree() -> np.ndarray:
    """A random tree: the parent of a node is any node before it."""
    rng = np.random.default_rng(1)
    return np.array([-1, *(int(rng.integers(0, n)) for n in range(1, NODES))])


def times_of(cp: Any, kind: str) -> Iterator[tuple[str, int, float, int]]:
    """(what, rows, milliseconds, bytes) of each measurement of a kind of state."""
    log, state = log_of(cp, kind, B)
    one, rows = draw(cp, B, 1), np.arange(B)

    def step(live: int) -> Callable[[], Any]:
        """A token after so many in the log."""

        def call() -> None:
            log.live[:], log.position[:], log._start[:] = live, live, 0
            log.step(*one)

        return call

    ms = timing.graph_ms(cp, [step(live) for live in range(LENGTH)])
    yield "token", B, ms, round(B * H * (state + TOKEN + (LENGTH + 1) / 2 * ENTRY))

    def flush() -> None:
        log._launch_there("fold", rows, live=np.full(B, LENGTH))

    yield "flush", B, timing.graph_ms(cp, [flush] * 3, 3), B * H * (2 * state + LENGTH * ENTRY)
    del log
    cp.get_default_memory_pool().free_all_blocks()
    log, state = log_of(cp, kind, DRAFTED)
    drafts = draw(cp, DRAFTED, NODES)
    size = DRAFTED * H * (state + NODES * (TOKEN + ENTRY))
    for what, parents in (("tree", tree()), ("chain", None)):
        call = lambda: log.verify(*drafts, parents=parents)  # noqa: B023, E731
        yield what, DRAFTED, timing.graph_ms(cp, [call] * 3, 3), size


def plain_step_ms(cp: Any) -> float:
    """Milliseconds of a token of `la.step`, whose float32 state is overwritten."""
    S = cp.zeros((B, H, D, D), dtype=np.float32)
    one = [x[:, 0] for x in draw(cp, B, 1)]
    return timing.graph_ms(cp, [lambda: la.step(la.gated_delta_rule, *one, state=S, overwrite_state=True)] * 8)


def rows_of(cp: Any, kinds: list[str], rate: float) -> Iterator[dict[str, Any]]:
    plain = plain_step_ms(cp)
    size = B * H * (2 * 4 * D * D + TOKEN)
    yield {"state": "float32", "what": "la.step", "rows": B, "us": 1e3 * plain, "bytes": size,
           "floor_us": size / rate / 1e3, "times_floor": plain * rate * 1e6 / size}  # fmt: skip
    for kind in kinds:
        cp.get_default_memory_pool().free_all_blocks()
        found = {}
        for what, rows, ms, size in times_of(cp, kind):
            found[what] = ms
            yield {"state": kind, "what": what, "rows": rows, "us": 1e3 * ms, "bytes": size,
                   "floor_us": size / rate / 1e3, "times_floor": ms * rate * 1e6 / size}  # fmt: skip
        both = found["token"] + found["flush"] / LENGTH
        yield {"state": kind, "what": "token and its share of a flush", "rows": B, "us": 1e3 * both,
               "la.step / this": plain / both}  # fmt: skip


def main(argv: list[str]) -> int:
    parser = report.parser("state_log", __doc__, peers=False)
    parser.add_argument("--states", nargs="+", default=list(KINDS), choices=KINDS)
    args = parser.parse_args(argv)
    import cupy as cp

    result = report.device(cp) | {"copy_gbs": timing.copy_gbs(cp, 1 << 30), "H": H, "D": D, "length": LENGTH,
                                   "nodes": NODES}  # fmt: skip

    def shown() -> Iterator[dict[str, Any]]:
        for row in rows_of(cp, args.states, result["copy_gbs"]):
            sys.stdout.write(" ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()) + "\n")
            sys.stdout.flush()
            yield row

    report.write_each(args.results, "cuda_state_log", result, shown())
    return 0
