"""The public functions as one head sees them, so that a test reads like its equation.

Arrays are (T, K), (T, V), (T,), states (K, V), and the scale is 1: the head axis is added on the way in and taken off
on the way out. Vectors are rows. A constant of the head (g of retention, u of rwkv6) comes without its head axis.
"""

from inspect import signature
from types import SimpleNamespace

import numpy as np

import linattn_np as la

CONSTANT_OF_THE_HEAD = {
    "retention": {"g"},
    "retnet": {"g"},
    "lightning_attention": {"slopes"},
    "rwkv6": {"u"},
    "mesa_net": {"ridge"},
    "mamba2": {"A", "D", "dt_bias"},
}


CONSTANT_OF_ALL_HEADS = ("theta", "gamma", "shift")


def data(T=12, K=5, V=3):
    """Seeded arrays of one head under the names of the formulas."""
    rng = np.random.default_rng(0)
    D = SimpleNamespace(T=T, K=K, V=V)
    D.q, D.k = rng.standard_normal((2, T, K))
    D.v = rng.standard_normal((T, V))
    D.g = -rng.uniform(0.05, 0.7, T)
    D.beta = rng.uniform(0.1, 1.9, T)
    D.gk, D.gv = -rng.uniform(0.05, 0.7, (T, K)), -rng.uniform(0.05, 0.7, (T, V))
    D.S0, D.dS = rng.standard_normal((2, K, V))
    D.u = rng.standard_normal(K)
    D.p, D.w = rng.standard_normal((2, T, K))
    D.dout = rng.standard_normal((T, V))
    D.ku = unit(D.k)
    D.kb = np.sqrt(D.beta)[:, None] * D.ku
    D.vb = np.sqrt(D.beta)[:, None] * D.v
    D.one = np.ones(T)
    D.M = np.tri(T)
    D.M_strict = np.tri(T, k=-1)
    b = np.cumsum(D.g)
    D.Gamma = np.exp(np.where(D.M > 0, b[:, None] - b, -np.inf))
    D.Gamma_strict = D.Gamma - np.eye(T)
    return D


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def tri(X):
    return np.tril(X)


def decayed_gram(x, y, b_x, b_y, diagonal=0):
    """sum_d x_id y_jd e^(b_x_id - b_y_jd) for j <= i + diagonal, else 0; masked before exp."""
    seen = np.tri(len(x), k=diagonal)[..., None] > 0
    exponent = np.where(seen, b_x[:, None] - b_y[None], -np.inf)
    return np.einsum("id,jd,ijd->ij", x, y, np.exp(exponent))


def agree(ours, expected, tolerance=1e-12):
    """max|a - b| <= tolerance max|b|."""
    ours, expected = np.asarray(ours), np.asarray(expected)
    assert ours.shape == expected.shape, (ours.shape, expected.shape)
    difference, size = np.abs(ours - expected).max(), np.abs(expected).max()
    assert difference <= tolerance * size, f"differs by {difference:.3g}, {difference / size:.3g} of the largest entry"


def with_head(fn, name, x):
    if x is None:
        return None
    if name == "state":
        return tuple(part[None] for part in x) if isinstance(x, tuple) else x[None]
    if name in CONSTANT_OF_ALL_HEADS:
        return x
    return np.asarray(x)[None] if name in CONSTANT_OF_THE_HEAD.get(fn.__name__, ()) else x[:, None]


def without_head(fn, name, x):
    if x is None:
        return None
    if name == "state":
        return tuple(part[0] for part in x) if isinstance(x, tuple) else x[0]
    if name in CONSTANT_OF_ALL_HEADS:
        return x
    return x[0] if name in CONSTANT_OF_THE_HEAD.get(fn.__name__, ()) else x[:, 0]


def arguments(fn, arrays, options):
    names = list(signature(fn).parameters)
    arrays = [with_head(fn, name, x) for name, x in zip(names, arrays, strict=False)]
    options = {
        name: with_head(fn, name, x) if name == "state" or isinstance(x, np.ndarray) else x
        for name, x in options.items()
    }
    return arrays, {"scale": 1, **options}


def run_with_state(fn, *arrays, **options):
    """(out (T, V), final state (K, V))."""
    arrays, options = arguments(fn, arrays, options)
    out, state = fn(*arrays, return_state=True, **options)
    return without_head(fn, "out", out), without_head(fn, "state", state)


def run(fn, *arrays, **options):
    """out (T, V)."""
    arrays, options = arguments(fn, arrays, options)
    return without_head(fn, "out", fn(*arrays, **options))


def final_state(fn, *arrays, **options):
    """The state after the last token, (K, V)."""
    return run_with_state(fn, *arrays, **options)[1]


def pull(fn, *arrays, dout=None, dstate=None, **options):
    """The gradient of <out, dout> + <state, dstate> by input name."""
    arrays, options = arguments(fn, arrays, options)
    _, pullback = la.vjp(fn, *arrays, return_state=True, **options)
    grads = pullback(with_head(fn, "out", dout), with_head(fn, "state", dstate))
    return SimpleNamespace(**{name: without_head(fn, name, x) for name, x in grads._asdict().items()})


def A(fn, *arrays, **options):
    """The (T, T) matrix with out = A v."""
    arrays, options = arguments(fn, arrays, options)
    return la.influence_matrix(fn, *arrays, **options)[0]


def explained(fn, T, K, V, **options):
    """What explain says of a call of these sizes; it counts a product of m x n x p as 2 m n p operations."""
    sizes = {"k": K, "q": K, "v": V}
    needed = [name for name, given in fn.spec.arrays.items() if not given.optional]
    arrays = [np.ones((T, 1, sizes[name])) if name in sizes else np.ones((T, 1)) for name in needed]
    return la.explain(fn, *arrays, **options)


def rows(x):
    """A number a token, (T,), as a column (T, 1)."""
    return x[:, None]
