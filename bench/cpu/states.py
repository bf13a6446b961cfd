"""What states at positions cost on a CPU: calls with 16 of them relative to calls with none.

    python -m bench states [--functions NAME ...] [--rounds 15] [--write]

One thread, float32, T = 4096; calls of one case alternate, and the least CPU time of each counts. Positions are every
256 tokens, or drawn at random. The byte floor is the time of a copy that writes as many bytes as the states have.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import linattn_np as la
from bench import record
from linattn_np.testing import sample

T, COUNT = 4096, 16
SIZES = ((1, 8, 64), (2, 4, 128))  # B, H, K = V
FUNCTIONS = ("simple_gla", "gated_delta_rule")
NARROW = ("gla", "kda", "rwkv7", "comba", "mlstm", "retnet", "gsa", "abc", "mesa_net")  # at the first size only


def positions() -> dict[str, list[int] | None]:
    """No positions, 16 every 256 tokens, and 16 drawn at random."""
    drawn = np.random.default_rng(0).choice(np.arange(1, T), COUNT, replace=False)
    return {"none": None, "every 256": list(range(T // COUNT, T + 1, T // COUNT)), "random": sorted(map(int, drawn))}


def arrays_of(name: str, B: int, H: int, D: int) -> dict[str, np.ndarray]:
    """Random float32 arrays of a call."""
    drawn = sample(getattr(la, name), np.random.default_rng(0), optional=False, B=(B,), T=T, H=H, K=D, V=D)
    return {n: x.astype(np.float32) for n, x in drawn.items()}


def call_of(name: str, arrays: dict[str, Any], at: list[int] | None, backward: bool) -> Callable[[], Any]:
    """A call, with the gradients of its output and states."""
    fn, options = getattr(la, name), {} if at is None else {"return_states_at": at}
    if name == "mesa_net":
        options |= {"solver": "conjugate_gradients", "iterations": 15, "tolerance": 0.0}
    if not backward:
        return lambda: fn(**arrays, **options)

    def both() -> Any:
        result, pullback = la.vjp(fn, **arrays, **options)
        return pullback(result) if at is None else pullback(result.out, None, result.states)

    return both


def least(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The least CPU milliseconds of each call, over rounds in alternating order."""
    found = dict.fromkeys(calls, float("inf"))
    for n in range(rounds + 1):
        for name in list(calls)[:: 1 - 2 * (n % 2)]:
            began = time.process_time()
            calls[name]()
            if n:  # the first one compiles
                found[name] = min(found[name], (time.process_time() - began) * 1e3)
    return found


def state_bytes(states: Any) -> int:
    """Bytes of states with any number of parts."""
    return sum(S.nbytes for S in (states if isinstance(states, tuple) else (states,)))


def copy_ms(size: int) -> float:
    """CPU milliseconds of a copy that writes `size` bytes."""
    x = np.ones(size, np.uint8)
    y = np.empty_like(x)
    return least({"copy": lambda: np.copyto(y, x)}, 9)["copy"]


def measure(name: str, size: tuple[int, int, int], backward: bool, rounds: int) -> dict[str, Any]:
    """A row: milliseconds without positions, and what 16 states add in per cent."""
    arrays, at = arrays_of(name, *size), positions()
    found = least({n: call_of(name, arrays, p, backward) for n, p in at.items()}, rounds)
    own = state_bytes(getattr(la, name)(**arrays, return_states_at=[T]).states) * COUNT
    row = {"function": name, "(B, H, D)": str(size), "what": "forward and backward" if backward else "forward",
           "CPU ms": found["none"]}  # fmt: skip
    row |= {f"{n} %": 100 * (found[n] / found["none"] - 1) for n in at if n != "none"}
    return row | {"state bytes": own, "byte floor %": 100 * copy_ms(own) / found["none"]}


def main(arguments: list[str]) -> int:
    parser = record.parser("states", __doc__)
    parser.add_argument("--functions", nargs="+", default=[*FUNCTIONS, *NARROW])
    parser.add_argument("--rounds", type=int, default=15)
    options, rows = parser.parse_args(arguments), []
    for name in options.functions:
        for size in SIZES if name not in NARROW else SIZES[:1]:
            for backward in (False, True):
                rows.append(measure(name, size, backward, options.rounds))
                print(record.cells(rows[-1]), flush=True)
    if options.write:
        what = {"T": T, "states": COUNT, "dtype": "float32", "threads": 1}
        print(record.write("states", record.rounded(what | {"rows": rows})))
    return 0
