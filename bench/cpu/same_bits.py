"""What the same bits in prefill, chunked prefill and decode cost on a CPU: chunk_size=1 relative to the default form.

    python -m bench same_bits [--rounds 7] [--write]

One thread, float32, T = 1024; calls of one case alternate, and the least CPU time of each counts. A backward keeps the
state of every token: their bytes, beside those of the arrays of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import linattn_np as la
from bench import record
from bench.cpu.states import arrays_of, least, state_bytes

T, SIZES = 1024, ((1, 4, 64), (1, 4, 128))  # B, H, K = V
FUNCTIONS = ("simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda", "rwkv7", "mlstm")


def call_of(name: str, arrays: dict[str, Any], backward: bool, **options: Any) -> Callable[[], Any]:
    """A call, with the gradients of its output."""
    fn = getattr(la, name)
    if not backward:
        return lambda: fn(**arrays, **options)

    def both() -> Any:
        out, pullback = la.vjp(fn, **arrays, **options)
        return pullback(out)

    return both


def measure(name: str, size: tuple[int, int, int], backward: bool, rounds: int) -> dict[str, Any]:
    """A row: milliseconds of both forms, and their quotient."""
    arrays = {n: x[:, :T] if x.ndim > 2 else x for n, x in arrays_of(name, *size).items()}
    forms = {"default": {}, "chunk_size=1": {"chunk_size": 1}}
    found = least({n: call_of(name, arrays, backward, **options) for n, options in forms.items()}, rounds)
    row = {"function": name, "(B, H, D)": str(size), "what": "forward and backward" if backward else "forward"}
    row |= {f"{n} ms": ms for n, ms in found.items()} | {"price": found["chunk_size=1"] / found["default"]}
    if backward:
        own = state_bytes(getattr(la, name)(**arrays, return_state=True).state)
        row |= {"bytes of states": T * own, "bytes of arrays": sum(x.nbytes for x in arrays.values())}
    return row


def main(arguments: list[str]) -> int:
    parser = record.parser("same_bits", __doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options, rows = parser.parse_args(arguments), []
    for name in FUNCTIONS:
        for size in SIZES:
            for backward in (False, True):
                rows.append(measure(name, size, backward, options.rounds))
                print(record.cells(rows[-1]), flush=True)
    if options.write:
        print(record.write("same_bits", record.rounded({"T": T, "dtype": "float32", "threads": 1, "rows": rows}, 3)))
    return 0
