"""Preconditioned delta rules: a key writes behind a diagonal factor that its channels' running squares give."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.types import Decay, Erase, PreconditionedState
from ...ops.preconditioner import Bounds, Keys, preconditioned, preconditioned_vjp
from ...ops.sums import sum_of_groups
from ...products import is_rounded, products
from ...runtime.arrays import Array, cast, device, shared_heads
from ...runtime.constants import constant_array
from ...runtime.shapes import check_state
from ...runtime.values import is_finite, shown
from ...spec import ArgSpec, Call, Samples, StateFormat, VariantSpec
from ..shared.arguments import CHANNEL_DECAY, LOG_DECAY, POSITIVE, QUERIES, STRENGTH, TOKEN_DECAY, UNIT_KEYS, VALUES
from ..shared.projections import LOG_DECAY as RAW_DECAY
from ..shared.projections import check_strengths, gate_arrays

CENTER = -0.2  # of published models


def _bounds(c: Call) -> Bounds:
    return Bounds(c.xp, c.sequences, float(c.options["span"]), float(c.options["eps"]), c.dtype)


def _keys(c: Call) -> Keys:
    center = c.center
    if center is None:
        make = functools.partial(c.xp.full, (c.sizes["H"],), CENTER, dtype=c.dtype, device=device(c.k))
        center = constant_array(c.xp, ("center", c.sizes["H"], str(c.dtype)), device(c.k), make)
    return Keys(c.k, c.g_square, c.beta_square, center)


def _before(c: Call) -> Array | None:
    return None if c.state is None else c.state.A


def _written(c: Call) -> tuple[Array, Array]:
    """(the keys that write, A after the last token), computed once a call."""
    if "written" not in vars(c):
        stored = c.k.dtype if is_rounded(c, "k") else c.dtype
        c.written = preconditioned(_bounds(c), _keys(c), _before(c), stored)
    return c.written


def _written_vjp(c: Call, dw: Array | None, dA: Array | None) -> dict[str, Array]:
    """Gradients by name; "state" is that of the initial A."""
    d, dbegin = preconditioned_vjp(_bounds(c), _keys(c), _before(c), dw, dA)
    found = {"k": d.k, "g_square": d.a, "beta_square": d.b, "state": dbegin}
    return found if c.center is None else found | {"center": d.center}


WRITES = (lambda c: _written(c)[0], lambda c, dw: _written_vjp(c, dw, None))
READS = (  # as many heads as the keys that write
    lambda c: shared_heads(c.xp, c.k, c.sizes["H"]),
    lambda c, dr: {"k": sum_of_groups(c.xp, dr, c.k.shape[-2])},
)


def pack_state(c: Call, state: Any) -> Array | None:
    if state is None:
        return None
    check_state(c.name, state.S, c.sizes, "H K V", "state.S")
    check_state(c.name, state.A, c.sizes, "H K", "state.A")
    return cast(c.xp, state.S, c.dtype)


def unpack_state(c: Call, S: Array) -> PreconditionedState:
    return PreconditionedState(S, _written(c)[1])


def unpack_state_vjp(c: Call, S: Array, d: Any) -> tuple[Array, dict[str, Array]]:
    return d.S, _written_vjp(c, None, d.A)


def pack_state_vjp(c: Call, dS: Array, dA: Array) -> PreconditionedState:
    return PreconditionedState(dS, dA)


class PreconditionedOptions(Options, total=False):
    """The common options, raw strengths, a gate with a lower bound, and the bounds of the preconditioner."""

    beta_sigmoid: bool
    allow_neg_eigval: bool
    lower_bound: float | None
    span: float
    eps: float


def check_options(fn: str, options: dict[str, Any]) -> None:
    check_strengths(fn, options)
    span, eps = options["span"], options["eps"]
    if not is_finite(span) or span < 1:
        raise ValueError(f"{fn}: span is {shown(span)}, expected a finite number >= 1")
    if not is_finite(eps) or eps <= 0:
        raise ValueError(f"{fn}: eps is {shown(eps)}, expected a finite number > 0")


OPTIONS = {"beta_sigmoid": False, "allow_neg_eigval": False, "lower_bound": None, "span": 1.5, "eps": 1e-6}
SQUARES = {
    "g_square": ArgSpec("T H", "log decay of the sum of squared keys, <= 0", limits=LOG_DECAY),
    "beta_square": ArgSpec("T H", "weight of the token in that sum, >= 0", limits=POSITIVE),
}
CENTERS = {"center": ArgSpec("H", "log of the sum at which the factor is 1; None: -0.2", optional=True)}
FACTORS = "A_t = e^{g_square_t} A_{t-1} + beta_square_t k_t * k_t;  m_t = span^{-softsign(log(A_t + eps) - center)};  "
STATE = StateFormat(PreconditionedState, None, pack_state, unpack_state, unpack_state_vjp, pack_state_vjp,
                    no_summary="keys have factors that are not linear in the state")  # fmt: skip

GATED = VariantSpec(
    name="preconditioned_gated_delta_rule",
    sentence="The gated delta rule whose key writes behind a diagonal preconditioner.",
    equation=FACTORS + "S~ = e^{g_t} S_{t-1};  S_t = S~ + (m_t * k_t)^T beta_t (v_t - k_t S~);  out_t = scale q_t S_t",
    paper="Tumma, Loo, Rus, Preconditioned DeltaNet, arXiv 2604.21100",
    arrays={"q": QUERIES, "k": UNIT_KEYS, "v": VALUES, "g": TOKEN_DECAY, "beta": STRENGTH, **SQUARES, **CENTERS,
            **gate_arrays()},
    change=products("q", "v", "beta", k=WRITES, r=READS, **RAW_DECAY),
    decay=Decay.SCALAR,
    erase=Erase.DELTA,
    state=STATE,
    options=OPTIONS,
    check_options=check_options,
)  # fmt: skip
KDA = replace(
    GATED,
    name="preconditioned_kda",
    called="Preconditioned KDA",
    sentence="Kimi delta attention whose key writes behind a diagonal preconditioner.",
    equation=FACTORS + "S~ = diag(e^{g_t}) S_{t-1};  S_t = S~ + (m_t * k_t)^T beta_t (v_t - k_t S~);  "
    "out_t = scale q_t S_t",
    arrays={**GATED.arrays, "g": CHANNEL_DECAY, **gate_arrays("H K")},
    decay=Decay.VECTOR,
)
SAMPLES = Samples(
    {"k": "unit", "beta": "positive", "g_square": "log decay", "beta_square": "positive"}, ({"eps": 0.1}, {"span": 2.0})
)


@public(GATED, SAMPLES)
def preconditioned_gated_delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, g_square: Any, beta_square: Any, center: Any = None,
    A_log: Any = None, dt_bias: Any = None, **options: Unpack[PreconditionedOptions],
) -> Any:  # fmt: skip
    """Preconditioned gated delta rule: the gated delta rule whose key writes behind a diagonal preconditioner.

        A_t = e^{g_square_t} A_{t-1} + beta_square_t k_t * k_t
        m_t = span^{-softsign(log(A_t + eps) - center)},   softsign(r) = r / (1 + |r|)
        S~ = e^{g_t} S_{t-1}
        S_t = S~ + (m_t * k_t)^T beta_t (v_t - k_t S~)
        out_t = scale q_t S_t

    q            (..., T, Hq, K)   queries
    k            (..., T, Hk, K)   keys, of unit length
    v            (..., T, H, V)    values
    g            (..., T, H)       log decay of the token, <= 0, -inf a hard reset; with A_log a raw projection
    beta         (..., T, H)       write strength in [0, 2], stable for beta m |k|^2 <= 2
    g_square     (..., T, H)       log decay of the sum A of squared keys, <= 0
    beta_square  (..., T, H)       weight of the token in A, >= 0
    center       (H,)              log of the sum at which the factor is 1; None: -0.2, as in published models
    A_log        (H,)              given, the log decay is -e^{A_log} softplus(g + dt_bias), as in Mamba-2
    dt_bias      (H,)              added to the raw g

    A channel that keys have used much writes less, and one that they have not used writes more. span=1.5: factors lie
    between 1 / span and span; with 1 it is gated_delta_rule. eps=1e-6 is added to A.
    beta_sigmoid=True: beta is a raw projection, sigmoid(beta) is used, with allow_neg_eigval=True twice that.
    lower_bound, below 0: the log decay is lower_bound sigmoid(e^{A_log} (g + dt_bias)); without A_log its factor is 1.
    The key reads the decayed state. la.nn.l2_norm divides keys by their length.
    The state is a PreconditionedState(S (..., H, K, V), A (..., H, K)). scale=None means K**-0.5.
    Returns out (..., T, max(Hq, H), V), and the state if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase DELTA. Common options: linattn_np.Options.
    Tumma, Loo, Rus, Preconditioned DeltaNet, arXiv 2604.21100.
    """


@public(KDA, SAMPLES)
def preconditioned_kda(
    q: Any, k: Any, v: Any, g: Any, beta: Any, g_square: Any, beta_square: Any, center: Any = None,
    A_log: Any = None, dt_bias: Any = None, **options: Unpack[PreconditionedOptions],
) -> Any:  # fmt: skip
    """Preconditioned KDA: Kimi delta attention whose key writes behind a diagonal preconditioner.

        A_t = e^{g_square_t} A_{t-1} + beta_square_t k_t * k_t
        m_t = span^{-softsign(log(A_t + eps) - center)},   softsign(r) = r / (1 + |r|)
        S~ = diag(e^{g_t}) S_{t-1}
        S_t = S~ + (m_t * k_t)^T beta_t (v_t - k_t S~)
        out_t = scale q_t S_t

    q            (..., T, Hq, K)   queries
    k            (..., T, Hk, K)   keys, of unit length
    v            (..., T, H, V)    values
    g            (..., T, H, K)    log decay of the key channels, <= 0, -inf a hard reset; with A_log a raw projection
    beta         (..., T, H)       write strength in [0, 2], stable for beta m |k|^2 <= 2
    g_square     (..., T, H)       log decay of the sum A of squared keys, <= 0
    beta_square  (..., T, H)       weight of the token in A, >= 0
    center       (H,)              log of the sum at which the factor is 1; None: -0.2, as in published models
    A_log        (H,)              given, the log decay is -e^{A_log} softplus(g + dt_bias), as in Mamba-2
    dt_bias      (H, K)            added to the raw g

    span=1.5 and eps=1e-6 are as in preconditioned_gated_delta_rule; with span=1 it is kda.
    beta_sigmoid=True: beta is a raw projection, sigmoid(beta) is used, with allow_neg_eigval=True twice that.
    lower_bound, below 0: the log decay is lower_bound sigmoid(e^{A_log} (g + dt_bias)); without A_log its factor is 1.
    la.nn.l2_norm divides keys by their length.
    The state is a PreconditionedState(S (..., H, K, V), A (..., H, K)). scale=None means K**-0.5.
    Returns out (..., T, max(Hq, H), V), and the state if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay VECTOR, erase DELTA. Common options: linattn_np.Options.
    Tumma, Loo, Rus, Preconditioned DeltaNet, arXiv 2604.21100.
    """
