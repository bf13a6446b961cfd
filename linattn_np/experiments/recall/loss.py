"""Next-token loss of a read-out, and the Adam optimiser."""

from dataclasses import dataclass, field

import numpy as np

from .memories import Logits
from .needles import ALPHABET
from .text import Corpus

COMMON, DRAWN = 512, 128  # candidates: the most frequent tokens, and a sample of the others


@dataclass(frozen=True)
class Candidates:
    """The tokens whose logits compete with the target's."""

    ids: np.ndarray  # (M,)
    bias: np.ndarray  # (M,) log priors, increased for sampled tokens by their log weight
    column: np.ndarray  # (N,) index of a token in `ids`, or -1


class Sampler:
    """Draws candidates: always the most frequent tokens and the answer characters, plus a sample of the others."""

    def __init__(self, corpus: Corpus) -> None:
        by_frequency = np.argsort(-corpus.log_prior, kind="stable")
        self.always = np.union1d(by_frequency[:COMMON], np.arange(len(ALPHABET)))
        self.rest = np.setdiff1d(by_frequency, self.always)
        self.log_prior = corpus.log_prior

    def draw(self, rng: np.random.Generator) -> Candidates:
        """A new sample; a sampled token represents len(rest) / DRAWN tokens."""
        drawn = rng.choice(self.rest, DRAWN, replace=False)
        weight = np.float32(np.log(len(self.rest) / DRAWN))
        ids = np.concatenate([self.always, drawn])
        bias = np.concatenate([self.log_prior[self.always], self.log_prior[drawn] + weight])
        column = np.full(len(self.log_prior), -1)
        column[ids] = np.arange(len(ids))
        return Candidates(ids, bias, column)


def next_token_loss(
    out: np.ndarray,
    target: np.ndarray,
    values: np.ndarray,
    log_prior: np.ndarray,
    log_tau: float,
    candidates: Candidates,
) -> tuple[float, np.ndarray, float]:
    """(mean loss in nats, gradients of out (..., V) and of log tau); logits = log prior + tau out . value.

    target (...) token ids; values (N, V), log_prior (N,) of all tokens. A target among the candidates counts once.
    """
    tau = np.asarray(np.exp(log_tau), out.dtype)
    o, t = out.reshape(-1, out.shape[-1]), target.reshape(-1)
    code, target_code = values[candidates.ids], values[t]
    logits = (tau * o) @ code.T  # (tokens, M)
    logits += candidates.bias
    target_logit = tau * (o * target_code).sum(1) + log_prior[t]
    twice = np.flatnonzero(candidates.column[t] >= 0)
    logits[twice, candidates.column[t[twice]]] = -np.inf
    top = np.maximum(logits.max(1), target_logit)
    logits -= top[:, None]
    weight = np.exp(logits, out=logits)
    target_weight = np.exp(target_logit - top)
    total = weight.sum(1) + target_weight
    loss = float((np.log(total) + top - target_logit).mean())
    # d loss / d (tau o) = sum_c p_c value_c - value_target
    dscaled = ((weight @ code + target_weight[:, None] * target_code) / total[:, None] - target_code) / len(t)
    dlog_tau = float(tau * (dscaled * o).sum())
    return loss, (tau * dscaled).reshape(out.shape), dlog_tau


@dataclass
class Adam:
    """Adam with betas 0.9 and 0.98: m and s are running means of the gradient and of its square."""

    m: Logits = field(default_factory=dict)
    s: Logits = field(default_factory=dict)
    count: int = 0

    def step(self, logits: Logits, grads: Logits, rate: float) -> Logits:
        """The logits after one step."""
        self.count += 1
        moved = {}
        for name, grad in grads.items():
            self.m[name] = 0.9 * self.m.get(name, 0) + 0.1 * grad
            self.s[name] = 0.98 * self.s.get(name, 0) + 0.02 * grad**2
            m = self.m[name] / (1 - 0.9**self.count)
            s = self.s[name] / (1 - 0.98**self.count)
            moved[name] = logits[name] - rate * m / (np.sqrt(s) + 1e-9)
        return moved
