"""`python -m bench gated_delta_rule`: on a CPU, beside transformers' fallbacks, torch's softmax, a plain loop."""

from __future__ import annotations

import numpy as np

from bench import compare, peers

SHAPES = [(1, 2048, 8, 64), (1, 4096, 8, 128), (1, 8192, 4, 128), (1, 2048, 32, 128)]


def draw(shape: tuple[int, int, int, int]) -> compare.Arrays:
    B, T, H, D = shape
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, B, T, H, D)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = -rng.uniform(0, 0.1, (B, T, H)).astype(np.float32)
    return {"q": q, "k": k, "v": v, "g": g, "beta": rng.uniform(0, 1, (B, T, H)).astype(np.float32)}


def calls(arrays: compare.Arrays, backward: bool) -> compare.Calls:
    return compare.ours("gated_delta_rule", arrays, backward) | peers.gated_delta_rule(arrays, backward)


CASE = compare.Case("gated_delta_rule", SHAPES, draw, calls, compare.delta_work, compare.exact("gated_delta_rule"))


def main(arguments: list[str]) -> int:
    return compare.main(CASE, arguments)
