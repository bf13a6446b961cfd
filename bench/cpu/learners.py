"""Weights that learn at test time, and log-linear attention, on a CPU, relative to straightforward PyTorch.

    python -m bench learners [--rounds 5] [--only ttt_linear] [--write]

One thread, float32, the same arrays, samples interleaved. The PyTorch functions are what their papers write: the dual
form of a mini-batch in matrix products (TTT, LaCT), a loop over tokens (Titans, Atlas, momentum), the whole matrix of
influences (log-linear attention), gradients by autograd.
Results are compared first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import linattn_np as la
from bench import record, timing

C = 16  # tokens of a mini-batch
KELLER = ((3.4445, -4.7750, 2.0315),) * 5
LACT = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012))  # fmt: skip


def heads_first(*arrays: torch.Tensor) -> list[torch.Tensor]:
    """(B, H, T, D) of (B, T, H, D), and of numbers (B, T, H) with D = 1."""
    return [(x if x.ndim == 4 else x[..., None]).transpose(1, 2) for x in arrays]


def slope(z: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The gradient of |LN(z) - target|^2 / 2."""
    s = torch.sqrt(z.var(-1, unbiased=False, keepdim=True) + 1e-6)
    x = (z - z.mean(-1, keepdim=True)) / s
    a = weight * (weight * x + shift - target)
    return (a - a.mean(-1, keepdim=True) - x * (a * x).mean(-1, keepdim=True)) / s


def gelu_slope(y: torch.Tensor) -> torch.Tensor:
    """The derivative of gelu."""
    u = torch.tanh(0.7978845608 * (y + 0.044715 * y**3))
    return 0.5 * (1 + u) + 0.5 * y * (1 - u * u) * 0.7978845608 * (1 + 3 * 0.044715 * y * y)


def ttt_linear(q: Any, k: Any, v: Any, eta: Any, W: Any, b: Any, weight: Any, shift: Any) -> torch.Tensor:
    """The dual form, a mini-batch after the other."""
    (q, k, v, eta), out = heads_first(q, k, v, eta), []
    weight, shift, b, K = weight[:, None], shift[:, None], b[:, None], q.shape[-1]
    lower = torch.tril(torch.ones(C, C))
    for t in range(0, q.shape[2], C):
        Q, X, V, E = (x[:, :, t : t + C] for x in (q, k, v, eta))
        G = E * slope(X @ W + b, V - X, weight, shift)
        z = Q @ W - ((Q @ X.mT + 1) * lower) @ G + b
        out.append(Q + F.layer_norm(z, (K,), eps=1e-6) * weight + shift)
        W, b = W - X.mT @ G, b - G.sum(-2, keepdim=True)
    return torch.cat(out, 2).transpose(1, 2)


def ttt_mlp(
    q: Any, k: Any, v: Any, eta: Any, W1: Any, b1: Any, W2: Any, b2: Any, weight: Any, shift: Any
) -> torch.Tensor:
    """The dual form of both layers."""
    (q, k, v, eta), out = heads_first(q, k, v, eta), []
    weight, shift, b1, b2, K = weight[:, None], shift[:, None], b1[:, None], b2[:, None], q.shape[-1]
    lower = torch.tril(torch.ones(C, C))
    for t in range(0, q.shape[2], C):
        Q, X, V, E = (x[:, :, t : t + C] for x in (q, k, v, eta))
        y = X @ W1 + b1
        h = F.gelu(y, approximate="tanh")
        G2 = slope(h @ W2 + b2, V - X, weight, shift)
        G1 = E * (G2 @ W2.mT) * gelu_slope(y)
        G2 = E * G2
        H = F.gelu(Q @ W1 - ((Q @ X.mT + 1) * lower) @ G1 + b1, approximate="tanh")
        z = H @ W2 - ((H @ h.mT + 1) * lower) @ G2 + b2
        out.append(Q + F.layer_norm(z, (K,), eps=1e-6) * weight + shift)
        W1, b1 = W1 - X.mT @ G1, b1 - G1.sum(-2, keepdim=True)
        W2, b2 = W2 - h.mT @ G2, b2 - G2.sum(-2, keepdim=True)
    return torch.cat(out, 2).transpose(1, 2)


def titans_linear(q: Any, k: Any, v: Any, eta: Any, mu: Any, g: Any, W: Any) -> torch.Tensor:
    """Gradients of a mini-batch at once, momentum and weights token by token."""
    (q, k, v, eta, mu, g), out = heads_first(q, k, v, eta, mu, g), []
    W = W.expand(q.shape[0], *W.shape)
    S, alpha = torch.zeros_like(W), torch.exp(g)
    for t in range(0, q.shape[2], C):
        error = 2 * eta[:, :, t : t + C] * (k[:, :, t : t + C] @ W - v[:, :, t : t + C])
        for i in range(C):
            at = slice(t + i, t + i + 1)
            S = mu[:, :, at] * S - k[:, :, at].mT @ error[:, :, i : i + 1]
            W = alpha[:, :, at] * W + S
            out.append(q[:, :, at] @ W)
    return torch.cat(out, 2).transpose(1, 2)


def titans(q: Any, k: Any, v: Any, eta: Any, mu: Any, g: Any, W1: Any, W2: Any) -> torch.Tensor:
    """Likewise, of two layers."""
    (q, k, v, eta, mu, g), out = heads_first(q, k, v, eta, mu, g), []
    now = [w.expand(q.shape[0], *w.shape) for w in (W1, W2)]
    S, alpha = [torch.zeros_like(w) for w in now], torch.exp(g)
    for t in range(0, q.shape[2], C):
        X, y = k[:, :, t : t + C], k[:, :, t : t + C] @ now[0]
        h = F.gelu(y, approximate="tanh")
        e = 2 * eta[:, :, t : t + C] * (h @ now[1] - v[:, :, t : t + C])
        u = (e @ now[1].mT) * gelu_slope(y)
        for i in range(C):
            at, one = slice(t + i, t + i + 1), slice(i, i + 1)
            rows = (X[:, :, one].mT @ u[:, :, one], h[:, :, one].mT @ e[:, :, one])
            S = [mu[:, :, at] * s - d for s, d in zip(S, rows, strict=True)]
            now = [alpha[:, :, at] * w + s for w, s in zip(now, S, strict=True)]
            out.append(F.gelu(q[:, :, at] @ now[0], approximate="tanh") @ now[1])
    return torch.cat(out, 2).transpose(1, 2)


def atlas(
    q: Any, k: Any, v: Any, share: Any, eta: Any, mu: Any, g: Any, W1: Any, W2: Any, window: int = 4
) -> torch.Tensor:
    """Likewise, each step with the tokens of a window, orthogonal."""
    (q, k, v, share, eta, mu, g), out = heads_first(q, k, v, share, eta, mu, g), []
    now = [w.expand(q.shape[0], *w.shape) for w in (W1, W2)]
    S, alpha = [torch.zeros_like(w) for w in now], torch.exp(g)
    for t in range(0, q.shape[2], C):
        first = max(t - window + 1, 0)
        X = k[:, :, first : t + C]
        y = X @ now[0]
        h = F.gelu(y, approximate="tanh")
        e = 2 * share[:, :, first : t + C] * (h @ now[1] - v[:, :, first : t + C])
        u = (e @ now[1].mT) * gelu_slope(y)
        for i in range(t, t + C):
            at, own = slice(i, i + 1), slice(max(i - window + 1, 0) - first, i + 1 - first)
            rows = (X[:, :, own].mT @ u[:, :, own], h[:, :, own].mT @ e[:, :, own])
            S = [mu[:, :, at] * s - eta[:, :, at] * d for s, d in zip(S, rows, strict=True)]
            now = [alpha[:, :, at] * w + orthogonal(s, KELLER) for w, s in zip(now, S, strict=True)]
            out.append(F.gelu(q[:, :, at] @ now[0], approximate="tanh") @ now[1])
    return torch.cat(out, 2).transpose(1, 2)


def levels(lam: torch.Tensor) -> torch.Tensor:
    """lam_i[bit_length(i xor j)], 0 for j > i."""
    i = torch.arange(lam.shape[2])
    level = torch.ceil(torch.log2((i[:, None] ^ i).double() + 1)).long()
    return torch.tril(torch.gather(lam, 3, level.expand(*lam.shape[:2], *level.shape)))


def decays(g: torch.Tensor) -> torch.Tensor:
    """e^{g_{j+1} + .. + g_i}, 0 for j > i."""
    b = g[..., 0].cumsum(-1)
    masked = torch.ones(b.shape[-1], b.shape[-1]).triu(1).bool()
    return torch.exp((b[..., None] - b[..., None, :]).masked_fill(masked, -torch.inf))


def log_linear_gla(q: Any, k: Any, v: Any, g: Any, lam: Any) -> torch.Tensor:
    """All pairs at once."""
    q, k, v, g, lam = heads_first(q, k, v, g, lam)
    A = q.shape[-1] ** -0.5 * (q @ k.mT) * decays(g)
    return ((A * levels(lam)) @ v).transpose(1, 2)


def log_linear_gated_delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, lam: Any) -> torch.Tensor:
    """All pairs at once, by one triangular system."""
    (q, k, v, g, beta, lam), T = heads_first(q, k, v, g, beta, lam), q.shape[1]
    E = decays(g)
    P, N = q.shape[-1] ** -0.5 * (q @ k.mT) * E, beta * (k @ k.mT) * torch.tril(E, -1)
    A = torch.linalg.solve_triangular(torch.eye(T) + N, P, upper=False, left=False, unitriangular=True) * beta.mT
    return ((A * levels(lam)) @ v).transpose(1, 2)


def preconditioned_gated_delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, g_square: Any, beta_square: Any, center: Any
) -> torch.Tensor:
    """Token by token."""
    (q, k, v, g, beta, a, b), out = heads_first(q, k, v, g, beta, g_square, beta_square), []
    S, A = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), torch.zeros(*q.shape[:2], 1, q.shape[-1])
    scale, center = q.shape[-1] ** -0.5, center[:, None, None]
    for t in range(q.shape[2]):
        at = slice(t, t + 1)
        A = torch.exp(a[:, :, at]) * A + b[:, :, at] * k[:, :, at] ** 2
        w = k[:, :, at] * 1.5 ** -F.softsign(torch.log(A + 1e-6) - center)
        S = torch.exp(g[:, :, at]) * S
        S = S + w.mT @ (beta[:, :, at] * (v[:, :, at] - k[:, :, at] @ S))
        out.append(scale * q[:, :, at] @ S)
    return torch.cat(out, 2).transpose(1, 2)


def momentum_delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, mu: Any) -> torch.Tensor:
    """Token by token."""
    (q, k, v, g, beta, mu), out = heads_first(q, k, v, g, beta, mu), []
    S = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    M, alpha, scale = torch.zeros_like(S), torch.exp(g), q.shape[-1] ** -0.5
    for t in range(q.shape[2]):
        at = slice(t, t + 1)
        S = alpha[:, :, at] * S
        M = mu[:, :, at] * M + k[:, :, at].mT @ (v[:, :, at] - k[:, :, at] @ S)
        S = S + beta[:, :, at] * M
        out.append(scale * q[:, :, at] @ S)
    return torch.cat(out, 2).transpose(1, 2)


def orthogonal(G: torch.Tensor, coefficients: Any) -> torch.Tensor:
    """Newton-Schulz."""
    X = G / (G.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    X = X.mT if G.shape[-2] > G.shape[-1] else X
    for a, b, c in coefficients:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if G.shape[-2] > G.shape[-1] else X


def lact(
    q: Any, k: Any, v: Any, eta_A: Any, eta_B: Any, eta_W: Any, mu: Any, A: Any, B: Any, W: Any, chunk: int = 512
) -> torch.Tensor:
    """Chunk by chunk."""
    (q, k, v, eta_A, eta_B, eta_W, mu), out = heads_first(q, k, v, eta_A, eta_B, eta_W, mu), []
    now, lengths = [A, B, W], [w.norm(dim=-2, keepdim=True) for w in (A, B, W)]
    P = [torch.zeros_like(w) for w in now]
    for t in range(0, q.shape[2], chunk):
        at = slice(t, t + chunk)
        A, B, W = now
        out.append((F.silu(q[:, :, at] @ A) * (q[:, :, at] @ B)) @ W)
        X, V = k[:, :, at], v[:, :, at]
        y, u, dh = X @ A, X @ B, V @ W.mT
        s = torch.sigmoid(y)
        dy = dh * u * s * (1 + y * (1 - s))
        G = [(eta_A[:, :, at] * X).mT @ dy, (eta_B[:, :, at] * X).mT @ (dh * y * s),
             (eta_W[:, :, at] * y * s * u).mT @ V]  # fmt: skip
        P = [mu[:, :, at].mean(2, keepdim=True) * p + d for p, d in zip(P, G, strict=True)]
        now = [w + orthogonal(p, LACT) for w, p in zip(now, P, strict=True)]
        now = [w * (n / (w.norm(dim=-2, keepdim=True) + 1e-5)) for w, n in zip(now, lengths, strict=True)]
    return torch.cat(out, 2).transpose(1, 2)


def draw(name: str, shape: tuple[int, int, int, int]) -> dict[str, np.ndarray]:
    """float32 arrays of (B, T, H, D); the second layer has 4 D channels, that of LaCT D."""
    (B, T, H, D), rng = shape, np.random.default_rng(0)
    fn = getattr(la, name)
    arrays = la.testing.sample(
        fn, rng, B=(B,), T=T, H=H, K=D, V=D, M=D if name == "lact" else 4 * D, optional="center" in fn.spec.arrays
    )
    wide = {"W": D, "W1": D, "W2": 4 * D, "A": D, "B": D}
    arrays = {n: x for n, x in arrays.items() if n not in ("A_log", "dt_bias")}
    arrays |= {n: rng.standard_normal(arrays[n].shape) / w**0.5 for n, w in wide.items() if n in arrays}
    arrays |= {n: arrays[n] / np.linalg.norm(arrays[n], axis=-1, keepdims=True) for n in ("q", "k")}
    return {n: np.ascontiguousarray(x, np.float32) for n, x in arrays.items()}


CASES: dict[str, tuple[Any, tuple[int, int, int, int], dict[str, Any]]] = {
    "ttt_linear": (ttt_linear, (1, 1024, 8, 64), {}),
    "ttt_mlp": (ttt_mlp, (1, 512, 4, 64), {}),
    "titans_linear": (titans_linear, (1, 1024, 8, 64), {}),
    "momentum_delta_rule": (momentum_delta_rule, (1, 1024, 8, 64), {}),
    "log_linear_gla": (log_linear_gla, (1, 1024, 8, 64), {}),
    "log_linear_gated_delta_rule": (log_linear_gated_delta_rule, (1, 1024, 8, 64), {}),
    "preconditioned_gated_delta_rule": (preconditioned_gated_delta_rule, (1, 1024, 8, 64), {}),
    "titans": (titans, (1, 256, 4, 64), {}),
    "atlas": (atlas, (1, 64, 2, 64), {}),
    "lact": (lact, (1, 1024, 1, 256), {"mini_batch": 512}),
}  # fmt: skip


def calls(name: str, arrays: dict[str, np.ndarray], backward: bool) -> dict[str, Callable[[], Any]]:
    """Ours and PyTorch's."""
    peer, _, options = CASES[name]
    fn, tensors = getattr(la, name), {n: torch.from_numpy(x) for n, x in arrays.items()}

    def ours() -> Any:
        if not backward:
            return fn(**arrays, **options)
        out, pullback = la.vjp(fn, **arrays, **options)
        return out, pullback(np.ones_like(out))

    def torchs() -> Any:
        if not backward:
            with torch.no_grad():
                return peer(**tensors)
        given = {n: x.clone().requires_grad_() for n, x in tensors.items()}
        out = peer(**given)
        out.backward(torch.ones_like(out))
        return out, [x.grad for x in given.values()]

    return {"linattn_np": ours, "PyTorch": torchs}


def check(name: str, arrays: dict[str, np.ndarray]) -> None:
    """Outputs and gradients agree."""
    (out, grads), (other, theirs) = (call() for call in calls(name, arrays, True).values())
    pairs = [(out, other.detach().numpy())]
    pairs += [(getattr(grads, n), d.numpy()) for n, d in zip(arrays, theirs, strict=True)]
    worst = max(la.testing.relative_error(a, b) for a, b in pairs)
    assert worst <= 2e-2, f"{name}: off by {worst:.2g}"


def main(arguments: list[str]) -> int:
    parser = record.parser("learners", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=CASES)
    options, rows = parser.parse_args(arguments), []
    torch.set_num_threads(1)
    for name in [options.only] if options.only else CASES:
        shape = CASES[name][1]
        arrays = draw(name, shape)
        check(name, arrays)
        for backward in (False, True):
            found = timing.interleaved(calls(name, arrays, backward), options.rounds)
            ms = {n: x["cpu_ms"] for n, x in found.items()}
            what = "forward and backward" if backward else "forward"
            rows.append({"function": name, "(B, T, H, D)": str(shape), "what": what, "CPU ms": ms["linattn_np"],
                         "PyTorch CPU ms": ms["PyTorch"],
                         "PyTorch / ours": ms["PyTorch"] / ms["linattn_np"]})  # fmt: skip
            print(record.cells(rows[-1]), flush=True)
    if options.write:
        print(record.write("learners", {"threads": 1, "dtype": "float32", "rows": rows}))
    return 0
