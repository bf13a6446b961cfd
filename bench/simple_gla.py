"""`python -m bench simple_gla`: scalar decay on a CPU, beside transformers' MiniMax and Mamba-2 paths.

The decay is constant in a head, since MiniMax's path knows no other; ours and Mamba-2's are given it token by token.
"""

from __future__ import annotations

import numpy as np

from bench import compare, peers

SHAPES = [(1, 2048, 8, 64), (1, 4096, 8, 128)]


def draw(shape: tuple[int, int, int, int]) -> compare.Arrays:
    B, T, H, D = shape
    q, k, v = np.random.default_rng(0).standard_normal((3, B, T, H, D)).astype(np.float32)
    g = np.broadcast_to(-(2.0 ** (-8 * np.arange(1, H + 1) / H)), (B, T, H)).astype(np.float32)
    return {"q": q, "k": k, "v": v, "g": g}


def calls(arrays: compare.Arrays, backward: bool) -> compare.Calls:
    return compare.ours("simple_gla", arrays, backward) | peers.simple_gla(arrays, backward)


CASE = compare.Case("simple_gla", SHAPES, draw, calls, compare.plain_work, compare.exact("simple_gla"))


def main(arguments: list[str]) -> int:
    return compare.main(CASE, arguments)
