"""Scaling on a GPU: simple GLA in chunks and as a recurrence, over tokens, heads and sequence lengths.

    python -m bench scaling --backend cuda [--results FOLDER]

tokens    chunks against the recurrence (chunk_size=1), one sequence of 32 heads, T = 256 ... 131072
heads     8192 tokens of 1 ... 256 heads, with sequences split into segments and without
length    tokens per second of 2^20 tokens of 4 heads, in sequences of 1024 ... 2^20 tokens
"""

from __future__ import annotations

import sys
from typing import Any

import linattn_np as la
from bench import record
from bench.cuda import passes, report, timing
from bench.cuda.simple_gla import draw
from linattn_np.matrix_state.cuda.scan import plan as cuda_plan

D = 128
LENGTHS = [256 << n for n in range(10)]
HEADS = [1 << n for n in range(9)]
TOTAL = 1 << 20


def _forward_ms(cp: Any, one: list[Any], **options: Any) -> float:
    return timing.median_ms(cp, [lambda: la.simple_gla(*one[:4], backend="cuda", **options)] * 2, repeats=5)


def _both_ms(cp: Any, one: list[Any]) -> float:
    return timing.median_ms(cp, [lambda: la.vjp(la.simple_gla, *one[:4], backend="cuda")[1](one[4])] * 2, repeats=5)


def over_tokens(cp: Any) -> list[dict[str, Any]]:
    rows = []
    for T in LENGTHS:
        one = draw(cp, (1, T, 32, D), "bfloat16", 0)
        rows.append({"T": T, "chunks_ms": _forward_ms(cp, one), "recurrence_ms": _forward_ms(cp, one, chunk_size=1)})
        _show(rows[-1])
    return rows


def over_heads(cp: Any) -> list[dict[str, Any]]:
    rows, default = [], cuda_plan.segments
    for H in HEADS:
        one = draw(cp, (1, 8192, H, D), "bfloat16", 0)
        row: dict[str, Any] = {"heads": H}
        for name, rule in (("as_chosen", default), ("uncut", lambda *_: 1)):
            with passes.override("segments", rule, cuda_plan):
                row[name] = {"forward_ms": _forward_ms(cp, one), "both_ms": _both_ms(cp, one)}
        rows.append(row)
        _show(row)
    return rows


def over_length(cp: Any) -> list[dict[str, Any]]:
    rows = []
    for T in (1 << n for n in range(10, 21, 2)):
        one = draw(cp, (TOTAL // T, T, 4, D), "bfloat16", 0)
        ahead, both = _forward_ms(cp, one), _both_ms(cp, one)
        rows.append(
            {
                "B": TOTAL // T,
                "T": T,
                "forward_ms": ahead,
                "both_ms": both,
                "forward_tokens_s": TOTAL / ahead * 1e3,
                "both_tokens_s": TOTAL / both * 1e3,
            }
        )
        _show(rows[-1])
        del one
        cp.get_default_memory_pool().free_all_blocks()
    return rows


def _show(row: dict[str, Any]) -> None:
    sys.stdout.write(record.cells(row) + "\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    args = report.parser("scaling", __doc__, peers=False).parse_args(argv)
    import cupy as cp

    result = report.device(cp) | {"function": "simple_gla", "K": D, "V": D, "dtype": "bfloat16"}
    result |= {"copy_gbs": timing.copy_gbs(cp), "tokens": over_tokens(cp), "heads": over_heads(cp)}
    result |= {"length": over_length(cp)}
    sys.stdout.write(f"{report.write(args.results, 'cuda_scaling', result)}\n")
    return 0
