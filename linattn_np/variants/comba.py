"""Comba: a delta rule whose erase vector p differs from its key and reads the state before it fades."""

from __future__ import annotations

from typing import Any, Unpack

from ..call import public
from ..card import Card, Given
from ..cores.kinds import Decay, Erase, Row
from ..cores.matrix_state.inputs import Inputs
from ..ground.namespace import Array
from ..projections import DEFAULTS, EXAMPLES, ProjectionOptions, gate_arrays, log_decay, log_decay_vjp


def to_core(c: Any) -> Inputs:
    return Inputs(c.q, c.k, c.v, log_decay(c)[..., None], r=c.p, beta=c.beta[..., None])


def to_core_vjp(c: Any, d: Inputs) -> dict[str, Array]:
    return {"q": d.q, "k": d.k, "v": d.v, "p": d.r, "beta": d.beta[..., 0]} | log_decay_vjp(c, d.g[..., 0])


CARD = Card(
    name="comba",
    sentence="A delta rule whose erase vector p differs from its key and reads the state before it fades.",
    equation="S_t = e^{g_t} S_{t-1} + k_t^T beta_t (v_t - p_t S_{t-1});  out_t = scale q_t S_t",
    paper="Hu et al., Comba, arXiv 2506.02475",
    arrays={
        "q": Given("T Hq K", "normal", "queries"),
        "k": Given("T Hk K", "unit", "keys, of unit length"),
        "v": Given("T H V", "normal", "values"),
        "p": Given("T Hk K", "half unit", "erase vectors"),
        "g": Given("T H", "log decay", "log decay of the token, <= 0"),
        "beta": Given("T H", "strength", "write strength in [0, 2]"),
        **gate_arrays(),
    },
    to_core=to_core,
    to_core_vjp=to_core_vjp,
    decay=Decay.SCALAR,
    erase=Erase.DELTA,
    erase_row=Row.BEFORE,
    options=DEFAULTS,
    examples=EXAMPLES,
)


@public(CARD)
def comba(
    q: Any, k: Any, v: Any, p: Any, g: Any, beta: Any, A_log: Any = None, dt_bias: Any = None,
    **options: Unpack[ProjectionOptions],
) -> Any:
    """Comba: a delta rule whose erase vector p differs from its key and reads the state before it fades.

        S_t = e^{g_t} S_{t-1} + k_t^T beta_t (v_t - p_t S_{t-1})
        out_t = scale q_t S_t

    q        (..., T, Hq, K)   queries (after the layer's output correction q - D p, where it has one)
    k        (..., T, Hk, K)   keys, of unit length, or of any with qk_l2norm
    v        (..., T, H, V)    values
    p        (..., T, Hk, K)   erase vectors, a fraction of k (of unit length) in the paper
    g        (..., T, H)       log decay of the token, <= 0, -inf a hard reset; with A_log a raw projection
    beta     (..., T, H)       write strength in [0, 2]
    A_log    (H,)              given, the log decay is -e^{A_log} softplus(g + dt_bias), as in Mamba-2
    dt_bias  (H,)              added to the raw g

    qk_l2norm=True: q and k are divided by their length, rows of 0 stay 0 (and pass their gradient as they are).
    p is used as it is given.
    p reads the state that has NOT faded yet; a public recurrent reference reads the faded one and disagrees with
    its own chunk form. scale=None means K**-0.5.
    Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase DELTA (reads BEFORE). Common options: linattn_np.options.Options.
    Hu et al., Comba, arXiv 2506.02475.
    """
