"""Pieces that mix tokens: the short convolution, the token shift, rotations by position."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ..call.results import Result
from ..ops.sequences import Sequences
from ..ops.short_conv import ShortConv, short_conv_vjp
from ..ops.short_conv import short_conv as convolved
from ..runtime.arrays import over_tokens
from ..runtime.values import is_word, shown
from .declaration import Call, Kind, Pullback, always, piece

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
        from ..ops.cpu.formulas import dense

        found, pull = _by_loops(c, x, conv, state, S)

        def with_weight(dy: Any, dstate: Any = None) -> dict[str, Any]:
            grads = pull(dy, dstate)
            dtaps = grads["weight"]
            return grads | {"weight": None if dtaps is None else dense(dtaps.T, dtaps.dtype)}

        return found, with_weight

    def pullback(dy: Any, dstate: Any = None) -> dict[str, Any]:
        grads = {} if dy is None else short_conv_vjp(sequences, x, conv, state, dy)._asdict()
        return _with_end(sequences, (x, state), grads, dstate)

    return Result(convolved(sequences, x, conv, state), sequences.last(x, state, S)), pullback


@piece(
    Kind(
        slots=lambda sizes: 1,
        array_calls=lambda given: "" if given["mix"] is not None else "a copy of tokens",
        stored=always,
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
    if c.on_device:
        found, pull = _launched(c, x, ShortConv(mix), state, S)
        return found, lambda dy, dstate=None: (grads := pull(dy, dstate)) | {"mix": grads["weight"]}
    if c.compiled and mix is not None:
        return _mixed(c, x, mix, state, S)
    if c.reads_states:
        assert c.states is not None  # of this piece
        state = c.states.begin(c.library)
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
    """x_t + mix (x_{t-1} - x_t) as a convolution with the taps mix and 1 - mix."""
    from ..ops.cpu import formulas
    from ..runtime.pieces.memory import working

    D, dtype = mix.shape, mix.dtype

    def less(one: Any, other: Any, out: Any) -> Any:
        """one - other"""
        minus = formulas.compiled("scaled", (other,), (D, dtype), dtype, -1.0)
        return formulas.compiled("added", (one, minus), out, dtype)

    taps = working((2, *D), dtype)
    formulas.put(taps[0], mix)
    less(formulas.constant_of(1.0, dtype), mix, taps[1])
    found, pull = _by_loops(c, x, ShortConv(taps.T), state, S)

    def pullback(dy: Any, dstate: Any = None) -> dict[str, Any]:
        grads = pull(dy, dstate)
        dtaps = grads["weight"]
        return grads | {"mix": None if dtaps is None else less(dtaps[0], dtaps[1], (D, dtype))}

    return found, pullback


def _by_loops(c: Call, x: Any, conv: ShortConv, state: Any, S: int) -> Computed:
    """short_conv and token_shift by compiled loops; `weight` of the gradients is (W, D)."""
    from ..ops.cpu import conv_states, short_conv
    from ..ops.cpu.formulas import zeros

    sequences, states, end = c.sequences, c.states, x[..., :0, :]
    assert states is not None  # these pieces have one
    rows = states.rows.at if c.reads_states and states.rows is not None else None
    y = short_conv.forward(sequences, x, conv, state, rows)
    if states.returned or states.overwritten:
        in_place = states.overwritten and c.reads_states and not np.may_share_memory(x, state)
        end = conv_states.end_of(sequences, x, state, S, rows, in_place)

    def pullback(dy: Any, dstate: Any = None) -> dict[str, Any]:
        if dy is None:
            grads: dict[str, Any] = {"x": zeros(x.shape, x.dtype), "weight": None, "bias": None, "state": None}
            if state is not None:
                grads["state"] = zeros(state.shape, state.dtype)
        else:
            grads = short_conv.backward(sequences, x, conv, state, dy)._asdict()
        if dstate is not None:
            conv_states.add_end_vjp(sequences, grads["x"], grads["state"], dstate)
        return grads

    return Result(y, end), pullback


def _launched(c: Call, x: Any, conv: ShortConv, state: Any, S: int) -> Computed:
    """short_conv and token_shift by CUDA kernels; a dense state is read and overwritten where it lies."""
    from ..ops.cuda import short_conv as launched

    sequences, states, end = c.sequences, c.states, x[..., :0, :]
    assert states is not None  # these pieces have one
    is_own = state is not None and state is states.whole
    places = states.rows.at if is_own and states.rows is not None else None
    if states.returned or states.overwritten:
        kind = x.dtype if state is None else state.dtype
        end = state if is_own and states.overwritten else launched.room_for_end(sequences, x, S, kind)
    if x.shape[-2] == 1 and sequences.offsets is None:
        y = launched.step(sequences, x, conv, state, end if end.size else None, places)
    else:
        y = launched.forward(sequences, x, conv, state, places)
        launched.end(sequences, x, state, end, places)

    def pullback(dy: Any, dstate: Any = None) -> dict[str, Any]:
        dy = c.xp.zeros_like(x) if dy is None else dy
        return launched.backward(sequences, x, conv, state, dy, dstate)._asdict()

    return Result(y, end), pullback


def _with_end(sequences: Sequences, given: tuple[Any, Any], grads: dict[str, Any], dstate: Any) -> dict[str, Any]:
    """Gradients with those of the final state."""
    if dstate is None:
        return grads
    for name, d in zip(("x", "state"), sequences.last_vjp(dstate, *given), strict=True):
        if d is not None:
            grads[name] = d if grads.get(name) is None else grads[name] + d
    return grads
