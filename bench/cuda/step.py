"""One token on a GPU, overwriting its state: in an eager loop, in a CUDA graph, and host time.

    python -m bench step --backend cuda [--results FOLDER] [--no-peers] [--state bfloat16 float16]

Each time is reported with the bytes that must move (the state read and written once, the vectors once) over the
measured copy rate, and with a copy of the state, which moves as many bytes. The calls rotate over more states than the
L2 cache holds. --state adds rows for states stored in 16 bits. FLA's kernels, where installed, write the final state
to a new tensor; with --no-peers their figures are carried over from the existing file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import linattn_np as la
from bench import record
from bench.cuda import passes, peers, report, timing

VARIANTS = ("simple_gla", "gated_delta_rule", "kda", "rwkv7", "rwkv6")
BATCHES = (1, 8, 32, 64, 256)
PEER_BATCHES = (1, 32, 256)
H, D = 32, 128
FLOAT32 = np.dtype(np.float32)
ROTATED = 512 << 20  # least bytes of the states in rotation


def draw(cp: Any, fn: Any, B: int, T: int, seed: int) -> dict[str, Any]:
    """bfloat16 vectors, float32 gates."""
    import ml_dtypes

    drawn = la.testing.sample(fn, np.random.default_rng(seed), B=(B,), T=T, H=H, K=D, V=D, optional=False)
    gates = ("g", "beta", "u")
    return {n: cp.asarray(x.astype(np.float32 if n in gates else ml_dtypes.bfloat16)) for n, x in drawn.items()}


def kind_of(state: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if state == "bfloat16" else state)


def count_of(B: int, kind: np.dtype) -> int:
    """Number of states in rotation."""
    return min(max(2, -(-ROTATED // (kind.itemsize * B * H * D * D))), 64)


def states_of(cp: Any, B: int, kind: np.dtype = FLOAT32) -> list[Any]:
    rng = cp.random.default_rng(0)
    return [rng.standard_normal((B, H, D, D), dtype=np.float32).astype(kind) for _ in range(count_of(B, kind))]


def calls_of(cp: Any, fn: Any, B: int, T: int, kind: np.dtype = FLOAT32) -> tuple[list[Callable[[], Any]], int]:
    """A call per state, and the bytes that one call must move."""
    arrays = draw(cp, fn, B, T, 0)
    states = states_of(cp, B, kind)
    moved = 2 * states[0].nbytes + sum(x.nbytes for x in arrays.values()) + arrays["v"].nbytes
    return [lambda S=S: fn(**arrays, state=S, overwrite_state=True) for S in states], moved


def copies_of(cp: Any, B: int, kind: np.dtype = FLOAT32) -> list[Callable[[], Any]]:
    floats = D * kind.itemsize // 4
    states = [cp.ones((2, B, H, D, floats), dtype=np.float32) for _ in range(count_of(B, kind))]
    return [lambda S=S: cp.copyto(S[0], S[1]) for S in states]


def error(cp: Any, fn: Any) -> float:
    """Relative error of the output of a token against float64."""
    arrays = draw(cp, fn, 2, 1, 3)
    state = cp.random.default_rng(1).standard_normal((2, H, D, D), dtype=np.float32)
    out = fn(**arrays, state=state).astype(np.float64)
    exact = fn(**{n: x.astype(np.float64) for n, x in arrays.items()}, state=state.astype(np.float64))
    return float(cp.linalg.norm(out - exact) / cp.linalg.norm(exact))


def peer_row(cp: Any, fn: Any, B: int, name: str, make: Callable[..., Any]) -> dict[str, Any]:
    """Times of FLA's kernel on the same arrays."""
    arrays = draw(cp, fn, B, 1, 0)
    calls = [make(arrays, S) for S in states_of(cp, B)]
    try:
        return {
            "name": name,
            "eager_us": timing.eager_ms(cp, calls) * 1e3,
            "host_us": timing.host_us(cp, calls[0], 100),
            "graph_us": timing.replay_ms(cp, peers.graph_of(calls)) * 1e3 / len(calls),
        }
    except Exception as error:
        return {"name": name} | passes.failure(error)


def measure(
    cp: Any, copy: float, batches: Sequence[int], others: bool, kind: np.dtype = FLOAT32
) -> list[dict[str, Any]]:
    """A row per variant, batch size and number of tokens; kind: dtype of stored states."""
    rows, narrow = [], kind != FLOAT32
    for B in batches:
        copied = timing.graph_ms(cp, copies_of(cp, B, kind)) * 1e3
        for name in VARIANTS:
            fn = getattr(la, name)
            for T in (1, 4, 16) if B == 32 else (1,):
                calls, moved = calls_of(cp, fn, B, T, kind)
                row = {
                    "variant": name,
                    "B": B,
                    "H": H,
                    "K": D,
                    "V": D,
                    "T": T,
                    "bytes": moved,
                    "floor_us": moved / copy / 1e3,
                    "copy_of_state_us": copied,
                    "eager_us": timing.eager_ms(cp, calls) * 1e3,
                    "graph_us": timing.graph_ms(cp, calls) * 1e3,
                    "host_us": timing.host_us(cp, calls[0]),
                }
                if narrow:
                    row["state"] = kind.name
                row["share_of_copy"] = row["floor_us"] / row["graph_us"]
                if others and T == 1 and B in PEER_BATCHES and (peer := peers.step(name)):
                    row["peer"] = peer_row(cp, fn, B, *peer)
                rows.append(row)
                sys.stdout.write(record.cells(row, skip=("H", "K", "V", "bytes")) + "\n")
                sys.stdout.flush()
                del calls
                cp.get_default_memory_pool().free_all_blocks()
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One token of 1 (float32 states), 32 and 256 sequences, and, with float32 states, 16 tokens of 32."""
    kept = ((1, 1), (32, 1), (32, 16), (256, 1))
    return [row for row in rows if (row["B"], row["T"]) in (kept[1::2] if "state" in row else kept)]


def keep_peers(path: Path, result: dict[str, Any]) -> None:
    """Copy other libraries' figures from the file at `path` into the rows of `result`."""
    before = json.loads(path.read_text())
    case = lambda row: tuple(row[n] for n in ("variant", "B", "T"))  # noqa: E731
    known = {case(row): row["peer"] for row in before["rows"] if "peer" in row}
    for row in result["rows"]:
        if case(row) in known:
            row["peer"] = known[case(row)]
    run = {n: before[n] for n in ("date", "gpu", "driver", "copy_gbs")}
    result["peers_measured_apart"] = before.get("peers_measured_apart", run)


def main(argv: list[str]) -> int:
    parser = report.parser("step", __doc__)
    parser.add_argument(
        "--state",
        nargs="+",
        default=[],
        choices=["bfloat16", "float16"],
        help="also measure states stored in these dtypes",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    args = parser.parse_args(argv)
    import cupy as cp

    errors = {name: error(cp, getattr(la, name)) for name in VARIANTS}
    if max(errors.values()) > 4e-3:
        sys.stderr.write(f"wrong: {errors}\n")
        return 1
    copy = timing.copy_gbs(cp)
    result = report.device(cp) | {
        "copy_gbs": copy,
        "vectors": "bfloat16",
        "gates": "float32",
        "state": "float32",
        "errors": errors,
        "rows": summary(measure(cp, copy, args.batches, not args.no_peers)),
    }
    if args.state:
        result["stored_states"] = [
            row for state in args.state for row in summary(measure(cp, copy, args.batches, False, kind_of(state)))
        ]
    if args.no_peers:
        keep_peers(args.results / "cuda_step.json", result)
    sys.stdout.write(f"{report.write(args.results, 'cuda_step', result)}\n")
    return 0
