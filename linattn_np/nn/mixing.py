"""Pieces that mix tokens: the short convolution, the token shift, rotations by position."""

from __future__ import annotations

from math import prod
from typing import Any

from ..call.results import Result
from ..ops.sequences import Sequences
from ..ops.short_conv import ShortConv, short_conv_vjp
from ..ops.short_conv import short_conv as convolved
from ..runtime.arrays import cast, over_tokens
from ..runtime.values import is_word, shown
from .declaration import Call, Kind, Pullback, piece

Computed = tuple[Any, Pullback]
ACTIVATIONS = ("silu", "swish")
WIDEST = 8  # with CUDA kernels


@piece(
    Kind(
        slots=lambda sizes: sizes["W"] - 1,
        operations=lambda n: 2 * prod(n["..."]) * n["T"] * n["D"] * n["W"],
        stored=lambda given: 1 <= given["weight"].shape[-1] <= WIDEST,
    ),
    x="... T D",
    weight="D W",
    bias="D?",
    state="S D?",
)
def short_conv(c: Call, x: Any, weight: Any, bias: Any = None, *, state: Any = None, activation: str | None = None,
               residual: bool = False, cu_seqlens: Any = None) -> Computed:  # fmt: skip
    """Causal convolution of each channel with its own W weights, before the queries, keys and values of most layers.

        z_t = bias + sum_{i < W} weight_{W-1-i} x_{t-i},   y_t = act(z_t) (+ x_t)

    x           (..., T, D)
    weight      (D, W)          the last one is the token's own
    bias        (D,)
    state       (..., S, D)     the S >= W - 1 inputs before the first token, oldest first; zeros by default. (N, S, D)
                                with cu_seqlens
    activation  None, "silu" or "swish"
    residual    y + x, as in Canon layers
    state_rows  one row of a pool `state` (P, S, D) for each sequence; -1: none, it begins with zeros

    Returns y (..., T, D) in x's dtype; with return_state=True (y, the last S inputs, S = W - 1 without a state). With
    overwrite_state=True they are written to `state`. la.vjp gives pullback(dout, dstate); la.step takes one token,
    x (..., D).
    Raises ValueError for a state that is too short. Dao, causal-conv1d; Allen-Zhu, Canon layers, 2025.
    """
    if activation is not None and not is_word(activation, ACTIVATIONS):
        raise ValueError(f"short_conv: activation is {shown(activation)}, expected None, 'silu' or 'swish'")
    if not isinstance(residual, bool):
        raise TypeError(f"short_conv: residual is {shown(residual)}, expected True or False")
    W = c.sizes["W"]
    S = W - 1 if state is None else state.shape[-2]
    if not W:
        raise ValueError(f"short_conv: weight has shape {tuple(weight.shape)}, expected (D, W) with W >= 1")
    if S < W - 1:
        raise ValueError(f"short_conv: state has shape {tuple(state.shape)}, expected (..., S, D) with S >= {W - 1}")
    conv = ShortConv(weight, bias, None if activation is None else "silu", residual)
    sequences = c.sequences
    if c.on_device and W <= WIDEST:
        return _launched(c, x, conv, state, S)
    if c.compiled:
        from ..ops.cpu import short_conv as loops

        y, f_vjp = loops.forward(sequences, x, conv, state), loops.backward
    else:
        y, f_vjp = convolved(sequences, x, conv, state), short_conv_vjp

    def pullback(dy: Any, dstate: Any = None) -> dict[str, Any]:
        grads = {} if dy is None else f_vjp(sequences, x, conv, state, dy)._asdict()
        return _with_end(sequences, (x, state), grads, dstate)

    return Result(y, sequences.last(x, state, S)), pullback


@piece(
    Kind(
        slots=lambda sizes: 1,
        array_calls=lambda given: "" if given["mix"] is not None else "a copy of tokens",
        stored=lambda given: given["mix"] is not None,
    ),
    x="... T D",
    mix="D?",
    state="S D?",
)
def token_shift(c: Call, x: Any, mix: Any = None, *, state: Any = None, cu_seqlens: Any = None) -> Computed:
    """The token before, or a mixture with it, as in RWKV.

        y_t = x_{t-1},   with mix   y_t = x_t + mix (x_{t-1} - x_t)

    x      (..., T, D)
    mix    (D,)           the share of the token before
    state  (..., 1, D)    the token before the first one, zeros by default; (N, 1, D) with cu_seqlens

    Options of states as in short_conv. Returns y (..., T, D) in x's dtype; with return_state=True (y, the last token).
    Peng et al., RWKV, arXiv 2305.13048.
    """
    sequences, S = c.sequences, 1 if state is None else state.shape[-2]
    if S < 1:
        raise ValueError(f"token_shift: state has shape {tuple(state.shape)}, expected (..., S, D) with S >= 1")
    if c.on_device and mix is not None:
        taps = ShortConv(c.xp.stack([cast(c.xp, mix, c.dtype), 1 - cast(c.xp, mix, c.dtype)], axis=-1))
        found, pull = _launched(c, x, taps, state, S)

        def mixed_vjp(dy: Any, dstate: Any = None) -> dict[str, Any]:
            grads = pull(dy, dstate)
            return grads | {"mix": grads["weight"][:, 0] - grads["weight"][:, 1]}

        return found, mixed_vjp
    if c.compiled and mix is not None:
        return _mixed(c, x, mix, state, S)
    before = sequences.before(x, state, 1)

    def pullback(dy: Any, dstate: Any = None) -> dict[str, Any]:
        grads: dict[str, Any] = {}
        if dy is not None:
            dx, dpast = sequences.before_vjp(dy if mix is None else dy * mix, state, 1)
            own = sequences.before(x, state, 1)
            grads = {"x": dx if mix is None else dx + (1 - mix) * dy, "state": dpast,
                     "mix": None if mix is None else over_tokens(c.xp, dy * (own - x))}  # fmt: skip
        return _with_end(sequences, (x, state), grads, dstate)

    y = before if mix is None else x + mix * (before - x)
    return Result(y, sequences.last(x, state, S)), pullback


def _mixed(c: Call, x: Any, mix: Any, state: Any, S: int) -> Computed:
    """x_t + mix (x_{t-1} - x_t) as a convolution with the weights (mix, 1 - mix)."""
    from ..ops.cpu import short_conv as loops

    sequences, conv = c.sequences, ShortConv(c.xp.stack([mix, 1 - mix], axis=-1))

    def pullback(dy: Any, dstate: Any = None) -> dict[str, Any]:
        grads: dict[str, Any] = {}
        if dy is not None:
            dx, dweight, _, dpast = loops.backward(sequences, x, conv, state, dy)
            grads = {"x": dx, "mix": dweight[:, 0] - dweight[:, 1], "state": dpast}
        return _with_end(sequences, (x, state), grads, dstate)

    return Result(loops.forward(sequences, x, conv, state), sequences.last(x, state, S)), pullback


def _launched(c: Call, x: Any, conv: ShortConv, state: Any, S: int) -> Computed:
    """short_conv by CUDA kernels."""
    from ..ops.cuda import short_conv as launched

    sequences = c.sequences

    def pullback(dy: Any, dstate: Any = None) -> dict[str, Any]:
        dy = c.xp.zeros_like(x) if dy is None else dy
        return launched.backward(sequences, x, conv, state, dy, dstate)._asdict()

    end = x[..., :0, :] if c.states is None or not (c.states.returned or c.states.overwritten) else launched.end(
        sequences, x, state, S, x.dtype if state is None else state.dtype)  # fmt: skip
    return Result(launched.forward(sequences, x, conv, state), end), pullback


def _with_end(sequences: Sequences, given: tuple[Any, Any], grads: dict[str, Any], dstate: Any) -> dict[str, Any]:
    """Gradients with those of the final state."""
    if dstate is None:
        return grads
    for name, d in zip(("x", "state"), sequences.last_vjp(dstate, *given), strict=True):
        if d is not None:
            grads[name] = d if grads.get(name) is None else grads[name] + d
    return grads
