"""Feature maps phi of linear attention, each with its transpose: phi(x) and phi_vjp(x, dphi).

A map is a pair (f, f_vjp) of functions of one array (..., K), its result being (..., M). FEATURE_MAPS has them by name;
a map with parameters has a function that returns the pair. An f_vjp with the attribute `takes_features` accepts f(x) as
a third argument instead of recomputing it. Compiled loops can evaluate an f with `steps`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import array_api_compat
import numpy as np

from ..runtime.arrays import Array, Namespace, cast, compute_dtype
from ..runtime.values import is_whole, is_word, shown
from . import learned_maps, map_steps, norms, polynomial_maps, random_maps
from .gates import silu, silu_vjp
from .host import kernels
from .rows import in_blocks

FeatureMap = tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]


def _xp(x: Array) -> Any:
    return array_api_compat.array_namespace(x)


def identity(x: Array) -> Array:
    return x


def identity_vjp(x: Array, dphi: Array) -> Array:
    return dphi


def _elementwise(kind: int, f: Callable[..., Array], f_vjp: Callable[..., Array]) -> FeatureMap:
    """f(xp, x) and f_vjp(xp, x, dphi) as a map; of NumPy and CuPy arrays it is the kernel of this kind.

    f takes rows of 16 bits as they are, and a dtype of the features, that of the computation if None.
    """

    def mapped(x: Array, dtype: Any = None) -> Array:
        if (cpu := kernels(_xp(x), x)) is not None:
            dtype = compute_dtype(_xp(x), x) if dtype is None else dtype
            return cpu.compiled("feature", (x,), (x.shape, dtype), dtype, how=kind)
        return f(_xp(x), x) if dtype is None else cast(_xp(x), f(_xp(x), x), dtype)

    def mapped_vjp(x: Array, dphi: Array) -> Array:
        if (cpu := kernels(_xp(x), x, dphi)) is not None and x.shape == dphi.shape:
            return cpu.compiled("feature_vjp", (x, dphi), (x.shape, dphi.dtype), dphi.dtype, how=kind)
        return f_vjp(_xp(x), x, dphi)

    mapped.__doc__ = f.__doc__
    mapped.takes_any_dtype = True  # type: ignore[attr-defined]
    return mapped, mapped_vjp


def _elu_plus_one(xp: Namespace, x: Array) -> Array:
    """x + 1 where x > 0, e^x elsewhere (Katharopoulos et al., arXiv 2006.16236)."""
    return xp.where(x > 0, x + 1, xp.exp(xp.where(x > 0, xp.zeros_like(x), x)))


def _elu_plus_one_vjp(xp: Namespace, x: Array, dphi: Array) -> Array:
    return dphi * xp.where(x > 0, xp.ones_like(x), xp.exp(xp.where(x > 0, xp.zeros_like(x), x)))


def _relu(xp: Namespace, x: Array) -> Array:
    """max(x, 0)."""
    return xp.where(x > 0, x, xp.zeros_like(x))


def _relu_vjp(xp: Namespace, x: Array, dphi: Array) -> Array:
    return xp.where(x > 0, dphi, xp.zeros_like(dphi))


def _exp(xp: Namespace, x: Array) -> Array:
    """e^x of every channel."""
    return xp.exp(x)


elu_plus_one, elu_plus_one_vjp = _elementwise(0, _elu_plus_one, _elu_plus_one_vjp)
relu, relu_vjp = _elementwise(1, _relu, _relu_vjp)
exp, exp_vjp = _elementwise(2, _exp, lambda xp, x, dphi: dphi * xp.exp(x))


# pairs of maps with parameters


def _by_rows(f: Callable[..., Array], f_vjp: Callable[..., Array]) -> FeatureMap:
    return in_blocks(f), in_blocks(f_vjp)


def dpfp(nu: int = 1) -> FeatureMap:
    """r (.) roll(r, j), j = 1 .. nu, of r = [relu(x), relu(-x)]; M = 2 K nu (Schlag et al., arXiv 2102.11174)."""
    _check("dpfp", "nu", nu)
    return _by_rows(lambda x: polynomial_maps.dpfp(_xp(x), x, nu),
                    lambda x, dphi: polynomial_maps.dpfp_vjp(_xp(x), x, nu, dphi))  # fmt: skip


def taylor(order: int = 2) -> FeatureMap:
    """Taylor features: phi(q) . phi(k) = sum_{p <= order} z^p / p!, z = q . k / sqrt(K) (Based, arXiv 2402.18668).

    Each monomial once: M = binomial(K + order, order), for the second order 1 + K + K (K + 1) / 2.
    """
    _check("taylor", "order", order)
    return powers(polynomial_maps.taylor_coefficients(order))


def binomial(n: int) -> FeatureMap:
    """phi(q) . phi(k) = (1 + q . k / sqrt(K))^n: the sum of binomial(n, p) z^p, M = binomial(K + n, n)."""
    if not is_whole(n):
        raise ValueError(f"binomial: n is {shown(n)}, expected a whole number from 1")
    return powers(tuple(float(math.comb(int(n), p)) for p in range(int(n) + 1)))


def powers(coefficients: tuple[float, ...]) -> FeatureMap:
    """phi(q) . phi(k) = sum_p c_p (q . k / sqrt(K))^p."""

    def f(x: Array) -> Array:
        if type(x) is np.ndarray and x.size:
            phi = polynomial_maps.powers_of_rows(np.reshape(x * _root(x), (-1, x.shape[-1])), coefficients)
            return np.reshape(phi, (*x.shape[:-1], phi.shape[-1]))
        return polynomial_maps.powers(_xp(x), x, coefficients, _root(x))

    def f_vjp(x: Array, dphi: Array) -> Array:
        if type(x) is np.ndarray and x.size:
            flat, d = (np.reshape(y, (-1, y.shape[-1])) for y in (x * _root(x), dphi))
            return np.reshape(_root(x) * polynomial_maps.powers_of_rows_vjp(flat, coefficients, d), x.shape)
        return polynomial_maps.powers_vjp(_xp(x), x, coefficients, dphi, _root(x))

    pair = _by_rows(f, f_vjp)
    pair[0].steps = map_steps.monomials(coefficients)  # type: ignore[attr-defined]
    return pair


def _root(x: Array) -> float:
    """K^{-1/4}: for q and for k, so that their product has K^{-1/2}."""
    return max(x.shape[-1], 1) ** -0.25


SQUARE: FeatureMap = powers((0.0, 0.0, 1.0))  # (q . k)^2 / K


def rebased(eps: float = 1e-5) -> FeatureMap:
    """(norm(q) . norm(k))^2 / K, norm to mean 0 and variance 1; M = K (K + 1) / 2 (ReBased, arXiv 2402.10644)."""

    def f(x: Array) -> Array:
        return SQUARE[0](norms.layer_norm(_xp(x), x, eps))

    def f_vjp(x: Array, dphi: Array) -> Array:
        y = norms.layer_norm(_xp(x), x, eps)
        return norms.layer_norm_vjp(_xp(x), x, SQUARE[1](y, dphi), eps)

    norm = (lambda x: norms.layer_norm(_xp(x), x, eps), lambda x, dy: norms.layer_norm_vjp(_xp(x), x, dy, eps))
    pair = _by_rows(f, f_vjp)
    pair[0].steps = SQUARE[0].steps._replace(before=_by_rows(*norm))  # type: ignore[attr-defined]
    return pair


def favor_plus(num_features: int | None = None, seed: int = 0, hyperbolic: bool = False) -> FeatureMap:
    """FAVOR+: positive orthogonal random features of e^{q . k / sqrt(K)} (Performer, arXiv 2009.14794).

    e^{w_i . y - |y|^2 / 2} / sqrt(M), y = x K^{-1/4}, the rows w_i orthogonal in blocks of K. num_features=None means
    K log K; hyperbolic takes every direction with both signs, so M is even. Nothing is
    subtracted that depends on other tokens: no exponent exceeds |w_i|^2 / 2.
    """
    if num_features is not None:
        _check("favor_plus", "num_features", num_features)
    if hyperbolic and num_features is not None and num_features % 2:
        raise ValueError(f"favor_plus: num_features is {num_features}, expected an even number where hyperbolic")

    def count(x: Array) -> int:
        m = random_maps.favor_features(int(x.shape[-1])) if num_features is None else num_features
        return m + m % 2 if hyperbolic else m

    def f_vjp(x: Array, dphi: Array, phi: Array | None = None) -> Array:
        return random_maps.favor_vjp(_xp(x), x, count(x), seed, hyperbolic, dphi, phi)

    f = in_blocks(lambda x: random_maps.favor(_xp(x), x, count(x), seed, hyperbolic),
                  lambda x, out: random_maps.favor_into(x, out, seed, hyperbolic))  # fmt: skip
    blocked = in_blocks(f_vjp)
    blocked.takes_features = True  # type: ignore[attr-defined]
    f.steps = map_steps.exponentials(num_features, seed, hyperbolic)  # type: ignore[attr-defined]
    return f, blocked


def random_fourier(num_features: int = 64, seed: int = 0, sigma: float = 1.0) -> FeatureMap:
    """[sin, cos](w_i . y / sigma) / sqrt(num_features), y = x / |x|; M = 2 num_features (RFA, arXiv 2103.02143).

    Their product has the mean e^{-|y_q - y_k|^2 / (2 sigma^2)}, which is e^{y_q . y_k / sigma^2} times a constant.
    """
    _check("random_fourier", "num_features", num_features)
    if not sigma > 0:
        raise ValueError(f"random_fourier: sigma is {sigma!r}, expected a number above 0")

    def f(x: Array) -> Array:
        return random_maps.fourier(_xp(x), norms.unit(_xp(x), x), num_features, seed, sigma)

    def f_vjp(x: Array, dphi: Array, phi: Array | None = None) -> Array:
        xp = _xp(x)
        dy = random_maps.fourier_vjp(xp, norms.unit(xp, x), num_features, seed, sigma, dphi, phi)
        return norms.unit_vjp(xp, x, dy)

    blocked, forward = in_blocks(f_vjp), in_blocks(f)
    blocked.takes_features = True  # type: ignore[attr-defined]
    forward.steps = map_steps.waves(num_features, seed, sigma)  # type: ignore[attr-defined]
    return forward, blocked


def t2r(W: Array, b: Array | None = None) -> FeatureMap:
    """relu(x W + b), W (K, M), b (M,), as a map; t2r_vjp has their gradients (Kasai et al., arXiv 2103.13076)."""

    def projected(x: Array) -> Array:
        return learned_maps.project(_xp(x), x, cast(_xp(x), W, x.dtype), b)

    return _by_rows(lambda x: relu(projected(x)), lambda x, dphi: t2r_vjp(x, W, b, dphi)[0])


def t2r_vjp(x: Array, W: Array, b: Array | None, dphi: Array) -> tuple[Array, Array, Array]:
    """(dx, dW, db) of relu(x W + b)."""
    xp = _xp(x)
    W = cast(xp, W, x.dtype)
    return learned_maps.project_vjp(xp, x, W, relu_vjp(learned_maps.project(xp, x, W, b), dphi))


def hedgehog(W: Array, b: Array | None = None) -> FeatureMap:
    """[softmax(y), softmax(-y)], y = x W + b, over the features; hedgehog_vjp has the gradients of W and b.

    W (K, M), b (M,); 2 M features (Zhang et al., arXiv 2402.04347). Without a projection: the name "hedgehog".
    """

    def projected(x: Array) -> Array:
        return learned_maps.project(_xp(x), x, cast(_xp(x), W, x.dtype), b)

    return _by_rows(lambda x: learned_maps.softmax_pair(_xp(x), projected(x)),
                    lambda x, dphi: hedgehog_vjp(x, W, b, dphi)[0])  # fmt: skip


def hedgehog_vjp(x: Array, W: Array, b: Array | None, dphi: Array) -> tuple[Array, Array, Array]:
    """(dx, dW, db) of [softmax(y), softmax(-y)], y = x W + b."""
    xp = _xp(x)
    W = cast(xp, W, x.dtype)
    dy = learned_maps.softmax_pair_vjp(xp, learned_maps.project(xp, x, W, b), dphi)
    return learned_maps.project_vjp(xp, x, W, dy)


def _check(fn: str, name: str, n: Any) -> None:
    if not is_whole(n):
        raise ValueError(f"{fn}: {name} is {shown(n)}, expected a whole number from 1")


FEATURE_MAPS: dict[str, FeatureMap] = {
    "identity": (identity, identity_vjp),
    "elu+1": (elu_plus_one, elu_plus_one_vjp),
    "relu": (relu, relu_vjp),
    "silu": _elementwise(3, silu, silu_vjp),
    "exp": (exp, exp_vjp),
    "t2r": (relu, relu_vjp),  # of an applied projection
    "hedgehog": _by_rows(
        lambda x: learned_maps.softmax_pair(_xp(x), x), lambda x, dphi: learned_maps.softmax_pair_vjp(_xp(x), x, dphi)
    ),
    "dpfp": dpfp(),
    "taylor": taylor(),
    "rebased": rebased(),
    "favor+": favor_plus(),
    "favor+ hyperbolic": favor_plus(hyperbolic=True),
    "fourier": random_fourier(),
}


def feature_map_pair(fn: str, spec: Any) -> tuple[FeatureMap, FeatureMap]:
    """The maps of q and of k from a name, a (f, f_vjp) pair, or two of those."""
    if isinstance(spec, tuple | list) and len(spec) == 2 and not all(map(callable, spec)):
        return _one(fn, spec[0]), _one(fn, spec[1])
    return (_one(fn, spec),) * 2


def _one(fn: str, spec: Any) -> FeatureMap:
    if is_word(spec, FEATURE_MAPS):
        return FEATURE_MAPS[spec]
    if isinstance(spec, tuple | list) and len(spec) == 2 and all(map(callable, spec)):
        return spec[0], spec[1]
    raise ValueError(
        f"{fn}: feature_map is {shown(spec)}, expected one of {', '.join(map(repr, FEATURE_MAPS))}, "
        "a pair (f, f_vjp) of functions, or two of those for q and k"
    )
