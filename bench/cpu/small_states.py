"""Recall from states in few bits: rounded after every token, or where a log of 16 tokens is flushed.

    python -m bench small_states [--tokens 1000] [--steps 500] [--write]

The gated delta rule, K = V = 64, 4 heads, 8 sequences: every token writes one of 48 random pairs, with a new value.
Then all keys are read. error: of what is read, relative to float64 (L2). recall: how often the nearest of all values is
the right one. Outliers: two channels of keys are 4 times, of values 30 times as large as the others; both figures
divide values by the size of their channel. Scales of whole numbers belong to value channels, as in la.pack_state, or to
key channels.

trained: a model of two layers that has learnt to recall eight facts (linattn compare, task mqar), and how many
of its answers are right. Outliers: two channels of its states times 4 or 30 as they are stored, as in a model whose
weights have these factors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import linattn_np as la
from bench import record
from linattn_np.experiments.compare import sweep

B, H, K, PAIRS, CHUNK = 8, 4, 64, 48, 16
TESTS = 8  # batches of 32 sequences of a trained model
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
    keys, values = rng.standard_normal((B, PAIRS, H, K)), rng.standard_normal((B, T, H, K))
    keys[..., :2] *= outliers[0]
    values[..., :2] *= outliers[1]
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    order = rng.permuted(np.tile(np.arange(PAIRS), -(-T // PAIRS)))[:T]
    last = [int(np.flatnonzero(order == n)[-1]) for n in range(PAIRS)]
    k = keys[:, order]
    arrays = [k, k, values, np.full((B, T, H), log_decay), np.full((B, T, H), 0.9)]
    return [x.astype(np.float32) for x in arrays], keys.astype(np.float32), values[:, last]


def end(arrays: list[np.ndarray], store: Store, each: int) -> np.ndarray:
    """The state after the tokens, rounded after every `each` of them."""
    S = np.zeros((B, H, K, K), np.float32)
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
        distance = np.linalg.norm(out[:, :, None] - values[:, None], axis=-1)  # (B, PAIRS, PAIRS, H)
        recall = np.mean(distance.argmin(2) == np.arange(PAIRS)[:, None])
        found |= {f"error, {word}": float(np.linalg.norm(out - right) / np.linalg.norm(right)),
                  f"recall, {word}": float(recall)}  # fmt: skip
    return {"outliers": outliers, "log decay": log_decay, "state": name} | found


# a trained model


def trained(steps: int) -> tuple[Any, dict[str, Any], Any]:
    """(the logits of a model that recalls, its parameters, its task)."""
    job = sweep.Job("mqar", "gated_delta_rule", 0.01, 1, sweep.Setup(steps=steps))
    task = sweep.task_of(job.task, job.setup)
    model = sweep.model_of(job, task.vocabulary)
    run = la.train.Run.start(model.loss, la.train.AdamW(decay=job.setup.decay), job.seed)
    la.train.fit(model.loss, run, task.batch(job.seed, job.setup.batch), steps, la.train.cosine(job.rate, steps),
                 bar=False)  # fmt: skip
    return model.logits, run.params.arrays, task


def stored(state: dict[str, Any], store: Store, outliers: tuple[int, int]) -> dict[str, Any]:
    """The states as they are after they were stored, two channels times a factor."""
    found = dict(state)
    for name, S in state.items():
        if S.ndim == 4:  # (B, H, K, V); others are rows of convolutions
            size = np.ones(S.shape[-2:], np.float32)
            size[:2] *= outliers[0]
            size[:, :2] *= outliers[1]
            found[name] = store(S * size) / size
    return found


def answers(model: tuple[Any, dict[str, Any], Any], store: Store, outliers: tuple[int, int], each: int) -> float:
    """The share of right answers with states that are stored after every `each` tokens."""
    logits, params, task = model
    right = count = 0
    for n in range(TESTS):
        ids, labels = task.draw(np.random.default_rng((sweep.AHEAD, n)), 32)
        state, outs = None, []
        for a, b in itertools.pairwise([*range(0, ids.shape[1], each), ids.shape[1]]):
            out, state = logits(params, ids[:, a:b], state=state, return_state=True)
            outs.append(out.argmax(axis=-1))
            state = stored(state, store, outliers)
        has = labels >= 0
        right, count = right + int((np.concatenate(outs, 1) == labels)[has].sum()), count + int(has.sum())
    return right / count


def rows_of_trained(steps: int) -> list[dict[str, Any]]:
    """Rows of every format."""
    model, rows = trained(steps), []
    for outliers, factors in OUTLIERS.items():
        for name in (n for n in FORMATS if "scales" not in n):
            found = {f"recall, {word}": answers(model, FORMATS[name], factors, each)
                     for each, word in ((1, "every token"), (CHUNK, "flushes"))}  # fmt: skip
            rows.append({"outliers": outliers, "state": name} | found)
            print("trained", record.cells(rows[-1]), flush=True)
    return rows


def main(arguments: list[str]) -> int:
    parser = record.parser("small_states", __doc__)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=500, help="of the trained model")
    options, rows = parser.parse_args(arguments), []
    for outliers in OUTLIERS:
        for log_decay in (-0.01, -0.001) if outliers == "none" else (-0.001,):
            for name in FORMATS:
                rows.append(row(options.tokens, outliers, log_decay, name))
                print(record.cells(rows[-1]), flush=True)
    learnt = rows_of_trained(options.steps)
    if options.write:
        found = {"T": options.tokens, "rows": rows, "trained": learnt}
        print(record.write("small_states", record.rounded(found, 4)))
    return 0
