"""Random calls of every piece with random options: a row has the same bits alone, batched, ragged and repeated.

Each example makes about ten calls: the batch three times, of which the last ones are replayed, into `out`, on two
threads, of strided arrays, by array calls, and a row alone; with gradients. `-m slow` makes 20,000 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la

pytest.importorskip("numba")
Draw = np.random.Generator
DTYPES = {np.float32: 2e-5, np.float64: 1e-12, np.float16: 4e-3, ml_dtypes.bfloat16: 3e-2}
PARAMETERS = ("weight", "bias", "mix", "A_log")
TOKENS = ("short_conv", "token_shift", "rotary")  # which take cu_seqlens


class Example(NamedTuple):
    """A call: floating arrays, integers, options."""

    arrays: dict[str, np.ndarray]
    whole: dict[str, np.ndarray] = {}  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012


def chosen(rng: Draw, *of: Any) -> Any:
    return of[int(rng.integers(len(of)))]


def some(rng: Draw, arrays: dict[str, Any]) -> dict[str, Any]:
    """Each with probability 2/3."""
    return {n: x for n, x in arrays.items() if rng.random() < 2 / 3}


def sized(rng: Draw) -> tuple[int, int, int, int]:
    return tuple(int(rng.integers(1, most)) for most in (4, 10, 4, 40))  # type: ignore[return-value]


def of_numbers(rng: Draw) -> Example:
    B, T, _, D = sized(rng)
    return Example({"x": 3 * rng.standard_normal((B, T, D))})


def of_pairs(rng: Draw) -> Example:
    x = of_numbers(rng).arrays["x"]
    return Example({"x": x, "gate": rng.standard_normal(x.shape)})


def of_norms(rng: Draw) -> Example:
    x = of_numbers(rng).arrays["x"]
    more = some(rng, {n: rng.standard_normal(x.shape[-1]) for n in ("weight", "bias")})
    return Example({"x": x, **more}, {}, {"eps": float(10.0 ** rng.integers(-7, 0))})


def of_groups(rng: Draw) -> Example:
    (arrays, _, options), groups = of_norms(rng), int(rng.integers(1, 5))
    wide = {n: np.concatenate([x] * groups, axis=-1) for n, x in arrays.items()}
    return Example(wide, {}, options | {"groups": groups, "centred": chosen(rng, True, False)})


def of_gated_norms(rng: Draw) -> Example:
    (arrays, _, options), x = of_norms(rng), None
    arrays.pop("bias", None)
    x = arrays["x"]
    group = chosen(rng, None, *[n for n in range(1, x.shape[-1] + 1) if x.shape[-1] % n == 0])
    how = {
        "activation": chosen(rng, "silu", "swish", "sigmoid"),
        "gate_first": chosen(rng, True, False),
        "group": group,
    }
    return Example(arrays | {"gate": rng.standard_normal(x.shape)}, {}, options | how)


def of_convolutions(rng: Draw) -> Example:
    B, T, _, D = sized(rng)
    W = int(rng.integers(1, 9))
    more = {"bias": rng.standard_normal(D), "state": rng.standard_normal((B, W - 1 + int(rng.integers(3)), D))}
    how = {"activation": chosen(rng, None, "silu", "swish"), "residual": chosen(rng, True, False),
           "return_state": chosen(rng, True, False)}  # fmt: skip
    return Example({"x": rng.standard_normal((B, T, D)), "weight": rng.standard_normal((D, W)), **some(rng, more)}, {},
                   how)  # fmt: skip


def of_shifts(rng: Draw) -> Example:
    B, T, _, D = sized(rng)
    more = {"mix": rng.standard_normal(D), "state": rng.standard_normal((B, int(rng.integers(1, 4)), D))}
    return Example(
        {"x": rng.standard_normal((B, T, D)), **some(rng, more)}, {}, {"return_state": chosen(rng, True, False)}
    )


def of_rotations(rng: Draw) -> Example:
    B, T, H, K = sized(rng)
    P, x = int(rng.integers(1, K + 1)), rng.standard_normal((B, T, H, 2 * K))
    interleaved = {"interleaved": chosen(rng, True, False)}
    if rng.random() < 0.5:
        lead = chosen(rng, (B, T), (B, T, H))
        return Example({"x": x, "angle": rng.standard_normal((*lead, P))}, {},
                       interleaved | {"cumulative": chosen(rng, True, False)})  # fmt: skip
    return Example({"x": x}, {}, interleaved | {"dims": chosen(rng, None, 2 * P), "offset": int(rng.integers(-9, 99))})


def of_xpos(rng: Draw) -> Example:
    B, T, H, K = sized(rng)
    how = {"inverse": chosen(rng, True, False), "interleaved": chosen(rng, True, False), "offset": int(rng.integers(9))}
    return Example({"x": rng.standard_normal((B, T, H, 2 * K))}, {}, how)


def of_decays(rng: Draw) -> Example:
    B, T, H, K = sized(rng)
    word = chosen(rng, "softplus", "bounded", "log_sigmoid", "lower_bound", "exp")
    how = {"formula": word} | {"log_sigmoid": {"divisor": 16.0}, "lower_bound": {"bound": 0.3}}.get(word, {})
    axes = chosen(rng, (), (K,))
    more = {"A_log": rng.standard_normal((H, *(1 for _ in axes))), "bias": rng.standard_normal((H, *axes))}
    if word in ("log_sigmoid", "lower_bound"):
        more.pop("A_log")
    return Example({"a": rng.standard_normal((B, T, H, *axes)), **some(rng, more)}, {}, how)


def of_products(rng: Draw) -> Example:
    B, T, M, K = sized(rng)
    return Example({"x": rng.standard_normal((B, T, K)), "weight": rng.standard_normal((K, M)),
                    **some(rng, {"bias": rng.standard_normal(M)})})  # fmt: skip


def of_tables(rng: Draw) -> Example:
    B, T, V, D = sized(rng)
    return Example({"weight": rng.standard_normal((V, D))}, {"ids": rng.integers(0, V, (B, T))})


def of_losses(rng: Draw) -> Example:
    B, T, _, D = sized(rng)
    hidden, V = chosen(rng, True, False), int(rng.integers(1, 30))
    labels = np.where(rng.random((B, T)) < 0.2, -100, rng.integers(0, V, (B, T)))
    how = {"label_smoothing": chosen(rng, 0.0, 0.1), "z_loss": chosen(rng, 0.0, 0.01), "reduction": "none"}
    if not hidden:
        return Example({"x": 3 * rng.standard_normal((B, T, V))}, {"labels": labels}, how)
    return Example({"x": rng.standard_normal((B, T, D)), "weight": rng.standard_normal((D, V)),
                    **some(rng, {"bias": rng.standard_normal(V)})}, {"labels": labels}, how)  # fmt: skip


def of_masks(rng: Draw) -> Example:
    return Example(of_numbers(rng).arrays, {}, {"rng": int(rng.integers(99)), "p": float(rng.random() / 2)})


NUMBERS = ("sigmoid", "silu", "softplus", "log_sigmoid", "gelu", "squared_relu", "l2_norm", "softmax")
MAKERS: dict[str, Callable[[Draw], Example]] = {
    **dict.fromkeys(NUMBERS, of_numbers), "swiglu": of_pairs, "rms_norm": of_norms, "layer_norm": of_norms,
    "group_norm": of_groups, "gated_norm": of_gated_norms, "short_conv": of_convolutions, "token_shift": of_shifts,
    "rotary": of_rotations, "xpos": of_xpos, "log_decay": of_decays, "linear": of_products, "embedding": of_tables,
    "cross_entropy": of_losses, "dropout": of_masks,
}  # fmt: skip
CALLS = 10  # of an example, in the mean


def parts(result: Any) -> list[np.ndarray]:
    return [y for y in (result if isinstance(result, tuple) else (result,)) if y is not None]


def strided(x: np.ndarray) -> np.ndarray:
    """The same numbers, apart from one another."""
    return np.repeat(x, 2, axis=-1)[..., ::2] if x.ndim else x


def same(one: Any, other: Any) -> None:
    """The same bits."""
    for x, y in zip(parts(one), parts(other), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert x.tobytes() == y.tobytes()


def gradients(fn: Any, given: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """(result, gradients by name) of cotangents that depend on the place in a row of the batch alone."""
    result, pullback = la.vjp(fn, **given, **options)
    d = [np.broadcast_to(np.cos(np.arange(y[0].size)).reshape(y[0].shape), y.shape).astype(y.dtype)
         for y in parts(result)]  # fmt: skip
    return result, {n: x for n, x in pullback(*d)._asdict().items() if x is not None}


def check(name: str, rng: Draw) -> None:
    fn, (arrays, whole, options) = getattr(la.nn, name), MAKERS[name](rng)
    dtype = chosen(rng, *DTYPES)
    arrays = {n: x.astype(dtype) for n, x in arrays.items()}
    given = arrays | whole
    first = fn(**given, **options)
    for _ in range(2):
        same(fn(**{n: x.copy() for n, x in given.items()}, **options), first)
    same(fn(**given, **options, num_threads=2), first)
    same(fn(**{n: strided(x) for n, x in arrays.items()}, **whole, **options), first)
    out = np.full_like(parts(first)[0], 7)
    same(fn(**given, **options, out=out), first)
    same(out, parts(first)[0])
    by_arrays = fn(**given, **options, backend="reference")
    for x, y in zip(parts(first), parts(by_arrays), strict=True):
        most = float(np.abs(y.astype(np.float64)).max(initial=1e-3))
        assert np.abs(x.astype(np.float64) - y.astype(np.float64)).max(initial=0) <= 4 * DTYPES[dtype] * most
    result, grads = gradients(fn, given, options)
    same(result, first)
    if "labels" not in given or "weight" not in given:
        again, more = gradients(fn, given, options)
        same(again, first)
        same(tuple(more.values()), tuple(grads.values()))
    if name == "dropout":
        return
    B = parts(first)[0].shape[0]
    b = int(rng.integers(B))
    row = {n: x if n in PARAMETERS else x[b : b + 1] for n, x in given.items()}
    alone, own = gradients(fn, row, options)
    same(alone, tuple(y[b : b + 1] for y in parts(first)))
    for n, d in own.items():
        if n not in PARAMETERS:
            same(d, grads[n][b : b + 1])
    if name in TOKENS:
        T = given["x"].shape[1]
        packed = {n: x if n in (*PARAMETERS, "state") else x.reshape(1, B * T, *x.shape[2:]) for n, x in given.items()}
        cuts = [n * T for n in range(B + 1)]
        for _ in range(2):
            ragged = parts(fn(**packed, **options, cu_seqlens=chosen(rng, cuts, np.array(cuts))))
            same(ragged[0].reshape(parts(first)[0].shape), parts(first)[0])
            same(tuple(ragged[1:]), tuple(parts(first)[1:]))


@pytest.mark.parametrize("name", MAKERS)
def test_a_few_random_calls(name):
    for n in range(4):
        check(name, np.random.default_rng([n, *name.encode()]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_twenty_thousand_random_calls(name):
    for n in range(4, 4 + 20_000 // (CALLS * len(MAKERS)) + 1):
        check(name, np.random.default_rng([n, *name.encode()]))
