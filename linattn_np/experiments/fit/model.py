"""The model: a memory of what a linear prediction misses, with learned gates.

    z_t      = the last WINDOW samples of all channels, and 1
    e_t      = x_t - z_{t-1} R                    what the linear prediction misses; R by ridge regression, fixed
    q_t      = a unit row of tanh(z_t W)          e_t is written under q_{t-1}
    gates    = z_t W_g + b, mapped into the limits of their array
    y_t      = z_t R + read_t P                   the prediction of x_{t+1}; P begins at 0

W, W_g, b and P are trained on the mean squared error of the next sample, with the pullback of the variant, and those of
the step with the least error on the last quarter of the training samples are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...ops.gates import sigmoid

WINDOW, HEADS, WIDTH = 8, 2, 16
Parameters = dict[str, np.ndarray]


def windows(x: np.ndarray) -> np.ndarray:
    """z (T, WINDOW C + 1) of a series (T, C); samples before the first are 0."""
    padded = np.concatenate([np.zeros((WINDOW - 1, x.shape[1])), x])
    z = np.lib.stride_tricks.sliding_window_view(padded, WINDOW, axis=0).reshape(len(x), -1)
    return np.concatenate([z, np.ones((len(x), 1))], axis=1)


def gates_of(fn: Any) -> dict[str, str]:
    """The arrays of a variant that are learned gates, with their axes.

    Raises ValueError for a variant with arrays that are neither q, k, v nor have limits.
    """
    change = fn.spec.change
    found = {}
    vectors = (change.query, change.key, change.value)
    for name, arg in fn.spec.arrays.items():
        if name in vectors or arg.reinterprets or (arg.optional and arg.limits is None):
            continue
        axes = arg.axes.split("|")[0]
        if arg.limits is None or "n" in axes.split() or "M" in axes.split():
            raise ValueError(f"{fn.__name__} has {name}, which is no gate with limits")
        found[name] = axes
    if any(n not in fn.spec.arrays or fn.spec.arrays[n].limits is not None for n in (change.query, change.key)):
        raise ValueError(f"{fn.__name__} has no queries and keys of its own")
    return found


def bounded(y: np.ndarray, limits: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """(y mapped into its limits, derivative): -softplus, softplus, or a sigmoid between them."""
    low, high = limits
    s = sigmoid(np, y)
    if low == -math.inf:
        return -np.logaddexp(0, y), -s
    if high == math.inf:
        return np.logaddexp(0, y), s
    return low + min(high - low, 1) * s, min(high - low, 1) * s * (1 - s)


@dataclass
class Model:
    """One variant and the linear prediction R (WINDOW C + 1, C); `start` draws its parameters."""

    fn: Any
    R: np.ndarray

    def __post_init__(self) -> None:
        self.gates = gates_of(self.fn)
        self.inputs, self.channels = self.R.shape

    def sizes(self, axes: str) -> tuple[int, ...]:
        """The sizes of an array without its token axis."""
        letters = {"H": HEADS, "Hq": HEADS, "Hk": HEADS, "K": WIDTH, "V": self.channels}
        return tuple(letters[a] for a in axes.split() if a != "T")

    def start(self, seed: int) -> Parameters:
        """Random features, slow decays, middle strengths; nothing of what is read is used yet."""
        rng = np.random.default_rng(seed)
        P = {"features": rng.standard_normal((self.inputs, HEADS * WIDTH)) / self.inputs**0.5,
             "read": np.zeros((HEADS * self.channels, self.channels))}  # fmt: skip
        for name, axes in self.gates.items():
            slow = self.fn.spec.arrays[name].limits[0] == -math.inf
            P[f"{name}.bias"] = np.full(self.sizes(axes), -3.0 if slow else 0.0)
            if axes.startswith("T"):
                P[f"{name}.weights"] = np.zeros((self.inputs, *self.sizes(axes)))
        return P

    def loss(self, P: Parameters, x: np.ndarray, last: int | None = None) -> tuple[np.ndarray, Any]:
        """(squared errors (T - 2, C) of the samples from 2 on, gradients of the mean of those before `last`).

        Without `last` there are no gradients.
        """
        import linattn_np as la

        T, C = x.shape
        z = windows(x)
        h = np.tanh(z @ P["features"]).reshape(T, HEADS, WIDTH)
        norm = np.linalg.norm(h, axis=-1, keepdims=True) + 1e-12
        unit = h / norm
        here = slice(1, T - 1)  # at t: x_t is written under what was known at t - 1, and x_{t+1} is predicted
        missed = x[1:] - z[:-1] @ self.R
        v = np.repeat(missed[:-1, None], HEADS, axis=1)
        change = self.fn.spec.change
        arrays = {change.query: unit[here], change.key: unit[:-2], change.value: v}
        slopes = {}
        for name, axes in self.gates.items():
            y = P[f"{name}.bias"]
            if axes.startswith("T"):
                y = y + np.tensordot(z[here], P[f"{name}.weights"], 1)
            arrays[name], slopes[name] = bounded(y, self.fn.spec.arrays[name].limits)
        if last is None:
            return (self.fn(**arrays, scale=1).reshape(T - 2, -1) @ P["read"] - missed[1:]) ** 2, None
        read, pullback = la.vjp(self.fn, **arrays, scale=1)
        flat = read.reshape(T - 2, -1)
        error = flat @ P["read"] - missed[1:]
        d = 2 * error * (np.arange(2, T) < last)[:, None] / (max(last - 2, 1) * C)
        grads = pullback((d @ P["read"].T).reshape(read.shape))
        dunit = np.zeros_like(unit)
        dunit[here] += getattr(grads, change.query)
        dunit[:-2] += getattr(grads, change.key)
        dh = (dunit - unit * np.sum(dunit * unit, axis=-1, keepdims=True)) / norm * (1 - h**2)
        G = {"features": z.T @ dh.reshape(T, -1), "read": flat.T @ d}
        for name, axes in self.gates.items():
            dy = getattr(grads, name) * slopes[name]
            G[f"{name}.bias"] = dy.sum(axis=0) if axes.startswith("T") else dy
            if axes.startswith("T"):
                G[f"{name}.weights"] = np.tensordot(z[here], dy, (0, 0))
        return error**2, G


def train(model: Model, x: np.ndarray, seed: int, steps: int, rate: float = 0.02) -> tuple[Parameters, list[float]]:
    """(the parameters with the least error on the last quarter of x, that error by step) of Adam on the rest."""
    P, errors = model.start(seed), list[float]()
    best = P
    last = 3 * len(x) // 4
    m, s = ({n: np.zeros_like(p) for n, p in P.items()} for _ in range(2))
    for step in range(1, steps + 1):
        squares, G = model.loss(P, x, last)
        errors.append(float(squares[last - 2 :].mean()))
        best = P if errors[-1] == min(errors) else best
        P = dict(P)
        for n, g in G.items():
            m[n] = 0.9 * m[n] + 0.1 * g
            s[n] = 0.99 * s[n] + 0.01 * g**2
            P[n] = P[n] - rate * (m[n] / (1 - 0.9**step)) / (np.sqrt(s[n] / (1 - 0.99**step)) + 1e-8)
    return best, errors


def ridge_regression(x: np.ndarray, ridge: float = 1e-3) -> np.ndarray:
    """R (WINDOW C + 1, C): the linear prediction of the next sample from its window."""
    z = windows(x)[:-1]
    return np.linalg.solve(z.T @ z + ridge * len(z) * np.eye(z.shape[1]), z.T @ x[1:])
