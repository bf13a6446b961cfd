"""Recall from states in few bits: rounded after every token, or where a log of 16 tokens is flushed.

    python -m bench small_states [--tokens 1000] [--write]

The gated delta rule, K = V = 64, 4 heads: every token writes one of 48 random pairs, with a new value. Then all keys
are read. error: of what is read, relative to float64 (L2). recall: how often the nearest of all values is the right
one. Outliers: two channels of keys are 4 times, of values 30 times as large as the others; both figures divide values
by the size of their channel. Scales of whole numbers belong to value channels, as in la.pack_state, or to key channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import linattn_np as la
from bench import record

H, K, PAIRS, CHUNK = 4, 64, 48, 16
OUTLIERS = {"none": (1, 1), "keys": (4, 1), "values": (1, 30)}  # factors of the first two channels
Store = Callable[[np.ndarray], np.ndarray]


def whole(kind: str, of_keys: bool) -> Store:
    """Whole numbers with a scale for each value channel, or for each key channel."""

    def rounded(S: np.ndarray) -> np.ndarray:
        S = S.swapaxes(-1, -2) if of_keys else S
        S = la.unpack_state(la.pack_state(S, kind))
        return S.swapaxes(-1, -2) if of_keys else S

    return rounded


FORMATS: dict[str, Store] = {"float32": lambda S: S} | {
    name: lambda S, kind=kind: S.astype(kind).astype(np.float32)
    for name, kind in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16))
}  # fmt: skip
FORMATS |= {kind + ", scales of key channels" * of_keys: whole(kind, of_keys)
            for kind in ("int16", "int12", "int8") for of_keys in (False, True)}  # fmt: skip


def tokens(T: int, log_decay: float, outliers: tuple[int, int]) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """(q, k, v, g, beta of the writes, the keys of all pairs, their last values)."""
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((1, PAIRS, H, K)), rng.standard_normal((1, T, H, K))
    keys[..., :2] *= outliers[0]
    values[..., :2] *= outliers[1]
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    order = rng.permuted(np.tile(np.arange(PAIRS), -(-T // PAIRS)))[:T]
    last = [int(np.flatnonzero(order == n)[-1]) for n in range(PAIRS)]
    k = keys[:, order]
    arrays = [k, k, values, np.full((1, T, H), log_decay), np.full((1, T, H), 0.9)]
    return [x.astype(np.float32) for x in arrays], keys.astype(np.float32), values[:, last]


def end(arrays: list[np.ndarray], store: Store, each: int) -> np.ndarray:
    """The state after the tokens, rounded after every `each` of them."""
    S = np.zeros((1, H, K, K), np.float32)
    for a in range(0, arrays[0].shape[1], each):
        S = la.gated_delta_rule(None, *(x[:, a : a + each] for x in arrays[1:]), state=S, return_state=True).state
        S = store(S)
    return S


def row(T: int, outliers: str, log_decay: float, name: str) -> dict[str, Any]:
    """Error and recall of a format."""
    arrays, keys, values = tokens(T, log_decay, OUTLIERS[outliers])
    exact = la.gated_delta_rule(None, *(x.astype(np.float64) for x in arrays[1:]), return_state=True).state
    size = np.array([OUTLIERS[outliers][1]] * 2 + [1] * (K - 2))
    right, found, values = la.read(keys.astype(np.float64), exact) / size, {}, values / size
    for each, word in ((1, "every token"), (CHUNK, "flushes")):
        out = la.read(keys, end(arrays, FORMATS[name], each)) / size
        distance = np.linalg.norm(out[:, :, None] - values[:, None], axis=-1)  # (1, PAIRS, PAIRS, H)
        recall = np.mean(distance.argmin(2) == np.arange(PAIRS)[:, None])
        found |= {f"error, {word}": float(np.linalg.norm(out - right) / np.linalg.norm(right)),
                  f"recall, {word}": float(recall)}  # fmt: skip
    return {"outliers": outliers, "log decay": log_decay, "state": name} | found


def main(arguments: list[str]) -> int:
    parser = record.parser("small_states", __doc__)
    parser.add_argument("--tokens", type=int, default=1000)
    options, rows = parser.parse_args(arguments), []
    for outliers in OUTLIERS:
        for log_decay in (-0.01, -0.001) if outliers == "none" else (-0.001,):
            for name in FORMATS:
                rows.append(row(options.tokens, outliers, log_decay, name))
                print(record.cells(rows[-1]), flush=True)
    if options.write:
        print(record.write("small_states", record.rounded({"T": options.tokens, "rows": rows}, 3)))
    return 0
