"""Why chunks and segments, on a GPU: simple GLA against its own recurrence, over tokens and over heads.

    python -m bench scaling --backend cuda [--results FOLDER]

tokens    chunks against the recurrence (chunk_size=1), one sequence of 32 heads, T = 256 ... 131072
heads     8192 tokens of 1 ... 256 heads, sequences cut into segments and not
length    tokens a second of 2^20 tokens of 4 heads, in sequences of 1024 ... 2^20 tokens
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import linattn_np as la
from bench import cuda_timing as timing
from bench import record
from bench.cuda_simple_gla import draw
from linattn_np import again
from linattn_np.cores.matrix_state import cuda_plan

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
        one = draw(cp, 1, T, 32, D, "bfloat16", 0)
        rows.append({"T": T, "chunks_ms": _forward_ms(cp, one), "recurrence_ms": _forward_ms(cp, one, chunk_size=1)})
        _show(rows[-1])
    return rows


def over_heads(cp: Any) -> list[dict[str, Any]]:
    rows, cut = [], cuda_plan.segments
    for H in HEADS:
        one = draw(cp, 1, 8192, H, D, "bfloat16", 0)
        row: dict[str, Any] = {"heads": H}
        for name, rule in (("as_chosen", cut), ("uncut", lambda *_: 1)):
            cuda_plan.segments = rule
            again.forget()
            try:
                row[name] = {"forward_ms": _forward_ms(cp, one), "both_ms": _both_ms(cp, one)}
            finally:
                cuda_plan.segments = cut
                again.forget()
        rows.append(row)
        _show(row)
    return rows


def over_length(cp: Any) -> list[dict[str, Any]]:
    rows = []
    for T in (1 << n for n in range(10, 21, 2)):
        one = draw(cp, TOTAL // T, T, 4, D, "bfloat16", 0)
        ahead, both = _forward_ms(cp, one), _both_ms(cp, one)
        rows.append({"B": TOTAL // T, "T": T, "forward_ms": ahead, "both_ms": both,
                     "forward_tokens_s": TOTAL / ahead * 1e3, "both_tokens_s": TOTAL / both * 1e3})
        _show(rows[-1])
        del one
        cp.get_default_memory_pool().free_all_blocks()
    return rows


def _show(row: dict[str, Any]) -> None:
    sys.stdout.write("  ".join(f"{n} {x:.4g}" if isinstance(x, float) else f"{n} {x}" for n, x in row.items()) + "\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench scaling --backend cuda", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    import cupy as cp

    result = timing.card(cp) | {"function": "simple_gla", "K": D, "V": D, "dtype": "bfloat16"}
    result |= {"copy_gbs": timing.copy_gbs(cp), "tokens": over_tokens(cp), "heads": over_heads(cp)}
    result |= {"length": over_length(cp)}
    sys.stdout.write(f"{timing.write(args.results, 'cuda_scaling', timing.rounded(result))}\n")
    return 0
