"""Fixed vectors of tokens: a random unit value per token, a hashed unit key per context."""

import zlib
from functools import lru_cache

import numpy as np

from .text import load_corpus

WIDTH = 128  # of keys and values: the head size of the papers
CONTEXT_WEIGHTS = (0.3, 0.6, 1.0, 1.0)  # of the contexts of 1, 2, 3, 4 tokens
TABLE_BITS = 12  # two tables of 4096 sign vectors: their products are 2^24 vectors
VALUE_STREAM, SIGN_STREAM = 0, 1  # independent random streams of one seed


class Codes:
    """Values of N tokens and keys of all contexts, determined by one seed."""

    def __init__(self, names: list[str], seed: int, width: int = WIDTH) -> None:
        hashes = [zlib.crc32(name.encode()) for name in names]
        gauss = [np.random.default_rng([h, seed, VALUE_STREAM]).standard_normal(width) for h in hashes]
        values = np.stack(gauss)
        self.values = (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)  # (N, K)
        self.hashes = np.array(hashes, np.uint64)
        bits = np.random.default_rng([seed, SIGN_STREAM]).integers(0, 2, (2, 1 << TABLE_BITS, width), np.int8)
        self.signs = 2 * bits - 1

    def contexts(self, ids: np.ndarray) -> np.ndarray:
        """Unit codes (B, T + 1, K) of the tokens before each position; k_t = contexts[t], q_t = contexts[t + 1].

        contexts[t] = unit(sum_n weight_n sign_vector(hash of the last n tokens before t))
        """
        B, T = ids.shape
        token = self.hashes[ids]
        context = np.zeros((B, T + 1), np.uint64)
        code = np.zeros((B, T + 1, self.values.shape[1]), np.float32)
        for n, weight in enumerate(CONTEXT_WEIGHTS):
            older = np.zeros((B, T + 1), np.uint64)
            older[:, n + 1 :] = token[:, : T - n]
            context = mix(context + older, n)
            code += np.float32(weight) * self.sign_vectors(context)
        code /= np.maximum(np.linalg.norm(code, axis=-1, keepdims=True), 1e-6)
        return code

    def sign_vectors(self, context: np.ndarray) -> np.ndarray:
        """One of 2^24 sign vectors per hash, the product of a row of each table: (..., K) int8."""
        mask = np.uint64((1 << TABLE_BITS) - 1)
        low = (context >> np.uint64(20)) & mask
        high = (context >> np.uint64(20 + TABLE_BITS)) & mask
        return self.signs[0][low] * self.signs[1][high]


def mix(x: np.ndarray, n: int) -> np.ndarray:
    """The n-th of a family of mixing hash functions on uint64."""
    x = (x + np.uint64(n + 1)) * np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(29)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(32))


@lru_cache(maxsize=8)
def load_codes(seed: int, path: str | None = None) -> Codes:
    """The codes of one seed for the vocabulary of `load_corpus(path)`."""
    return Codes(load_corpus(path).vocabulary.names, seed)
