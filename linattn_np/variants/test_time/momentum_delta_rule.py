"""Momentum delta rule: the corrections of a gated delta rule have momentum."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...fast_weights.core import FastWeights
from ...fast_weights.types import Inputs, Learner, LinearMomentum, MomentumState
from ...ops.host import zeros_like
from ...ops.sums import added
from ...runtime.arrays import Array, device, name_of
from ...runtime.constants import constant_array
from ...runtime.shapes import check_state
from ...runtime.values import is_word, shown
from ...spec import ArgSpec, Call, Samples, StateFormat, VariantSpec
from ..shared.arguments import QUERIES, STRENGTH, TOKEN_DECAY, UNIT_KEYS, VALUES
from ..shared.learners import MOMENTUM, RATE, learns


class MomentumOptions(Options, total=False):
    """The common options, and which state a key predicts with."""

    predict: str


def learner(options: Any) -> Learner:
    """The squared error of every token at the state before it."""
    return Learner("linear", "l2", mini_batch=1, decayed=options["predict"] == "decayed")


def check(fn: str, options: dict[str, Any]) -> None:
    """Raise ValueError for a prediction that there is not."""
    if not is_word(options["predict"], ("decayed", "previous")):
        raise ValueError(f"{fn}: predict is {shown(options['predict'])}, expected 'decayed' or 'previous'")


BASE = learns()


def number(c: Call, x: float) -> Array:
    """A number as a constant (1,)."""
    make = partial(c.xp.full, (1,), x, dtype=c.dtype, device=device(c.v))
    return constant_array(c.xp, ("number", x, name_of(c.dtype)), device(c.v), make)


def to_core(c: Call) -> Inputs:
    """Without eta it is 1; the initial weights are 0."""
    eta = c.xp.broadcast_to(number(c, 1.0), c.beta.shape) if c.eta is None else c.eta
    x = BASE.to_core(c.changed(eta=eta))
    return x._replace(weights=(c.xp.broadcast_to(number(c, 0.0), (c.sizes["H"], c.sizes["K"], c.sizes["V"])),))


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    """As of other learners, without initial weights."""
    found = BASE.to_core_vjp(c, d._replace(weights=()))
    return found if c.eta is not None else {n: y for n, y in found.items() if n != "eta"}


def pack(c: Call, state: Any) -> Any:
    """The weights are S, also those at which the gradient is taken."""
    if state is None:
        return None
    for part, S in state._asdict().items():
        check_state(c.name, S, c.sizes, name=f"state.{part}")
    return LinearMomentum(state.S, state.S, state.M, None)  # every token ends a mini-batch: none are counted


def pack_vjp(c: Call, d: Any, other: Any) -> Any:
    """dS has two parts."""
    return MomentumState(added(c.xp, d.W, d.W_start), d.W_momentum)


def unpack(c: Call, S: Any) -> Any:
    """S and M."""
    return MomentumState(S.W, S.W_momentum)


def unpack_vjp(c: Call, S: Any, d: Any) -> tuple[Any, dict[str, Array]]:
    """The other parts have no gradient."""
    return LinearMomentum(d.S, zeros_like(c.xp, d.S), d.M, None), {}


SPEC = VariantSpec(
    name="momentum_delta_rule",
    sentence="The corrections of a gated delta rule have momentum.",
    equation="M_t = mu_t M_{t-1} + eta_t k_t^T (v_t - p_t S_{t-1}), p_t = e^{g_t} k_t or k_t;"
             "  S_t = e^{g_t} S_{t-1} + beta_t M_t;  out_t = scale q_t S_t",
    paper="Behrouz, Zhong, Mirrokni, Titans, arXiv 2501.00663",
    arrays={"q": QUERIES, "k": UNIT_KEYS, "v": VALUES, "g": TOKEN_DECAY, "beta": STRENGTH, "mu": MOMENTUM,
            "eta": ArgSpec("T H", "share of the error that enters the momentum; None: 1", True, limits=RATE.limits)},
    change=replace(BASE, to_core=to_core, to_core_vjp=to_core_vjp, linear=True),
    core=FastWeights(learner, LinearMomentum),
    shares_states=False,
    state=StateFormat(MomentumState, pack=pack, unpack=unpack, pack_vjp=pack_vjp, unpack_vjp=unpack_vjp,
                      axes={"S": "H K V", "M": "H K V"},
                      stacks=True),
    options={"predict": "decayed"},
    check_options=check,
)  # fmt: skip
SAMPLES = Samples({"k": "unit", "beta": "positive", "mu": "share", "eta": "positive"},
                  options=({}, {"predict": "previous"}))  # fmt: skip


@public(SPEC, SAMPLES)
def momentum_delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, mu: Any, eta: Any = None, **options: Unpack[MomentumOptions]
) -> Any:
    """Momentum delta rule: the corrections of a gated delta rule have momentum.

        M_t = mu_t M_{t-1} + eta_t k_t^T (v_t - p_t S_{t-1})
        S_t = e^{g_t} S_{t-1} + beta_t M_t
        out_t = scale q_t S_t

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys, of unit length
    v      (..., T, H, V)    values
    g      (..., T, H)       log decay of the state, <= 0
    beta   (..., T, H)       part of the momentum that is written, in [0, 2]
    mu     (..., T, H)       what remains of the momentum, in [0, 1]
    eta    (..., T, H)       share of the error that enters the momentum; None: 1

    predict="decayed": p_t = e^{g_t} k_t, as in gated_delta_rule; "previous": p_t = k_t, as in comba. With mu = 0 it is
    these rules with strength beta eta.
    scale=None means K**-0.5. Returns out (..., T, H, V), and the MomentumState (S, M) (..., H, K, V) if return_state.
    Other texts write -M for our M.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: fast_weights. Common options: linattn_np.Options.
    Behrouz, Zhong, Mirrokni, Titans, arXiv 2501.00663.
    """
