"""Lightning attention: linear attention with one published slope per head."""

from __future__ import annotations

import math
from typing import Any, Unpack

import numpy as np

from ...call.dispatch import public
from ...matrix_state.types import Decay, Inputs
from ...ops.product import multiple
from ...ops.sums import over_tokens
from ...runtime.arrays import Array, device
from ...runtime.constants import constant_array
from ...runtime.values import LARGEST, is_whole, is_word, shown
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, VariantSpec
from ..shared.arguments import KEYS, POSITIVE, QUERIES, VALUES
from ..shared.projections import MappedOptions, with_feature_map


def alibi_slopes(H: int) -> np.ndarray:
    """2^{-8 (h + 1) / H}. H not a power of two: the slopes of the next lower power P, then every other slope of 2 P."""
    power = 2 ** math.floor(math.log2(H)) if H else 0
    if power == H:
        return 2.0 ** (-8.0 * (np.arange(H) + 1) / max(H, 1))
    return np.concatenate([alibi_slopes(power), alibi_slopes(2 * power)[0::2][: H - power]])


def published_slopes(rule: str, H: int, layer: int, num_layers: int) -> np.ndarray:
    """Slopes (H,) of one layer by the rules of three public implementations."""
    h = np.arange(H)
    if rule == "lightning":
        depth = layer / (num_layers - 1) if num_layers > 1 else 0.0
        return alibi_slopes(H) * (1 - depth + 1e-5)
    if rule == "minimax":
        return 2.0 ** (-8.0 * (h + 1) / max(H, 1)) * (1 - layer / (num_layers - 1 + 1e-5) + 1e-5)
    return 8.0 / max(H, 1) * h * (1 - layer / num_layers)


RULES = ("lightning", "minimax", "fla")


def _log_decay(c: Call) -> Array:
    xp = c.xp
    if c.slopes is not None:
        return multiple(xp, -1.0, c.slopes, c.dtype)
    rule = (c.options["rule"], c.sizes["H"], c.options["layer"], c.options["num_layers"])

    def make() -> Array:
        return xp.asarray((-published_slopes(*rule)).tolist(), dtype=c.dtype, device=device(c.v))

    return constant_array(xp, ("lightning", *rule, str(c.dtype)), device(c.v), make)


def to_core(c: Call) -> Inputs:
    """g = -slope of the head, at every token."""
    g = _log_decay(c)
    return Inputs(c.q, c.k, c.v, c.xp.broadcast_to(g[None, :, None], (c.sizes["T"], c.sizes["H"], 1)))


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    grads = {"q": d.q, "k": d.k, "v": d.v}
    if c.slopes is None:
        return grads
    return grads | {"slopes": multiple(c.xp, -1.0, over_tokens(c.xp, d.g, 2)[:, 0], c.dtype)}


def check_options(fn: str, options: dict[str, Any]) -> None:
    rule, layer, layers = options["rule"], options["layer"], options["num_layers"]
    if not is_word(rule, RULES):
        raise ValueError(
            f"{fn}: slopes is {shown(rule)}, expected an array (H,), None or one of {', '.join(map(repr, RULES))}"
        )
    if not (is_whole(layer, 0) and is_whole(layers, 1, LARGEST) and layer < layers):
        raise ValueError(
            f"{fn}: layer is {shown(layer)} of num_layers {shown(layers)}, expected 0 <= layer < num_layers"
        )


class LightningOptions(MappedOptions, total=False):
    """The common options, and the index of the layer and the number of layers of the published slopes."""

    layer: int
    num_layers: int


SPEC = with_feature_map(
    VariantSpec(
        name="lightning_attention",
        sentence="Linear attention with one published slope per head.",
        equation="S_t = e^{-slope} S_{t-1} + k_t^T v_t;  out_t = scale q_t S_t",
        paper="Qin et al., TransNormerLLM and Lightning Attention-1, -2, arXiv 2307.14995, 2401.04658",
        arrays={
            "q": QUERIES,
            "k": KEYS,
            "v": VALUES,
            "slopes": ArgSpec(
                "H", "minus the log decay of the head; None or a name: a published rule", True, limits=POSITIVE
            ),
        },
        change=ChangeOfVariables(to_core, to_core_vjp, gate="slopes"),
        decay=Decay.SCALAR,
        scaled=False,
        options={"layer": 0, "num_layers": 1},
        check_options=check_options,
        rules={"slopes": ("rule", "lightning")},
    )
)


@public(SPEC, Samples({"slopes": "positive"}))
def lightning_attention(q: Any, k: Any, v: Any, slopes: Any = None, **options: Unpack[LightningOptions]) -> Any:
    """Lightning attention: linear attention with one published slope per head (TransNormerLLM, MiniMax-01).

        S_t = e^{-slope} S_{t-1} + k_t^T v_t
        out_t = scale q_t S_t

    q       (..., T, Hq, K)   queries, after the layer's silu
    k       (..., T, Hk, K)   keys, after the layer's silu
    v       (..., T, H, V)    values
    slopes  (H,)              minus the log decay, >= 0, with its gradient; or the name of a published rule:
                              "lightning" (the default) ALiBi slopes times (1 - layer / (num_layers - 1) + 1e-5),
                              "minimax" 2^{-8 (h + 1) / H} times (1 - layer / (num_layers - 1 + 1e-5) + 1e-5),
                              "fla" 8 h / H times (1 - layer / num_layers), h from 0

    feature_map: a map of q and k as in linear_attention; the state is then (..., H, M, V).
    layer, num_layers: index of the layer and number of layers, for the published rules. In a model of one layer the
    first rule's fraction is 0 / 0; it is read as 0.
    scale=None means 1. Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase NONE. Common options: linattn_np.Options.
    Qin et al., TransNormerLLM and Lightning Attention-1, -2, arXiv 2307.14995, 2401.04658.
    """
