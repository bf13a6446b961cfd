"""merge: attention over two sets of keys from attention over each of them."""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array
from . import doubts
from .declaration import Call, Kind, Pullback, piece


@piece(
    Kind(
        "... V+1",
        wide=True,
        has_lse=True,
        array_calls=lambda given: "a few operations on whole arrays",
        doubts=doubts.of_lse,
        infinite=("lse1", "lse2"),
    ),
    out1="... V",
    lse1="...",
    out2="... V",
    lse2="...",
)
def merge(c: Call, out1: Any, lse1: Any, out2: Any, lse2: Any) -> tuple[Any, Pullback]:
    """Softmax attention over the keys of two parts, from the outputs and log sums of each part.

        lse = log(e^lse1 + e^lse2),   p_i = e^{lse_i - lse},   out = p_1 out1 + p_2 out2
        dout_i = p_i dout,   dlse_i = p_i (dlse + <dout, out_i - out>)

    out1, out2  (..., V)   of la.softmax_attention(..., return_lse=True)
    lse1, lse2  (...)      -inf: the part has no keys, its out is not read

    The order of parts does not matter, and more of them are merged one after the other. A sink belongs to one part.
    Returns (out (..., V) in out1's dtype, lse (...) in float32, or float64 if an array is); la.vjp's pullback takes
    (dout, dlse), of which one may be None. Milakov and Gimelshein, arXiv 1805.02867; Liu et al., Ring Attention,
    arXiv 2310.01889.
    """
    xp, logs, outs = c.xp, (lse1, lse2), []
    most = xp.maximum(*logs)
    none = most == float("-inf")
    most = xp.where(none, xp.zeros_like(most), most)
    parts = [xp.exp(log - most) for log in logs]
    total = parts[0] + parts[1]
    total = xp.where(none, xp.ones_like(total), total)
    lse = xp.where(none, logs[0], most + xp.log(total))
    shares = [part / total for part in parts]
    for o, log in zip((out1, out2), logs, strict=True):
        outs.append(xp.where(log[..., None] == float("-inf"), xp.zeros_like(o), o))
    out = shares[0][..., None] * outs[0] + shares[1][..., None] * outs[1]

    def pullback(dy: Array) -> dict[str, Any]:
        dout, dlse = dy[..., :-1], dy[..., -1]
        grads = {}
        for n, (share, o) in enumerate(zip(shares, outs, strict=True), 1):
            grads[f"out{n}"] = share[..., None] * dout
            grads[f"lse{n}"] = share * (dlse + xp.sum(dout * (o - out), axis=-1))
        return grads

    return xp.concat([out, lse[..., None]], axis=-1), pullback
