"""Gated slot attention, and attention with bounded memory control: softmax over decaying slots."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.readouts.slots import SlotInputs
from ...matrix_state.types import BoundedState, Decay, Readout, SlotState
from ...ops.complement import log_rest, log_rest_vjp
from ...ops.shares import Shares, last_sum_vjp, shares, shares_vjp
from ...runtime.arrays import Array, cast, device
from ...runtime.constants import constant_zeros
from ...runtime.shapes import Sequence, check_state, segments
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import KEYS, LOG_DECAY, QUERIES, VALUES


def to_core(c: Call) -> SlotInputs:
    """g = log(1 - s) where it is not given."""
    g = log_rest(c.xp, c.s, c.dtype) if c.g is None else c.g
    return SlotInputs(c.q, c.k, c.v, c.s, g)


def to_core_vjp(c: Call, d: SlotInputs) -> dict[str, Array]:
    """Without g: dg / ds = -1 / (1 - s); 0 for an emptied slot, s = 1."""
    xp, grads = c.xp, {"q": d.q, "k": d.k, "v": d.v, "s": d.s, "g": d.g}
    if c.g is None:
        grads["s"] = log_rest_vjp(xp, c.s, d.s, grads.pop("g"), c.dtype)
    return grads


def pack_state(c: Call, state: Any) -> tuple[Array, Array] | None:
    if state is None:
        return None
    return _memories(c, state)


def _memories(c: Call, state: Any) -> tuple[Array, Array]:
    for part, axes in (("S", "H M V"), ("W", "H K M")):
        check_state(c.name, getattr(state, part), c.sizes, axes, f"state.{part}")
    return cast(c.xp, state.S, c.dtype), cast(c.xp, state.W, c.dtype)


def unpack_state(c: Call, state: tuple[Array, Array]) -> SlotState:
    return SlotState(*state)


SPEC = VariantSpec(
    name="gsa",
    called="Gated slot attention",
    sentence="Softmax over slots, each of which decays and takes in keys and values.",
    equation="W_t = W_{t-1} diag(e^{g_t}) + k_t^T s_t;  S_t = diag(e^{g_t}) S_{t-1} + s_t^T v_t;  "
    "out_t = softmax(scale q_t W_t) S_t",
    paper="Zhang et al., Gated Slot Attention, arXiv 2409.07146",
    arrays={
        "q": QUERIES,
        "k": KEYS,
        "v": VALUES,
        "s": ArgSpec("T H M", "how much each slot takes of the token", limits=(0.0, 1.0)),
        "g": ArgSpec("T H M", "log decay of the slots, <= 0; None: log(1 - s)", optional=True, limits=LOG_DECAY),
    },
    change=ChangeOfVariables(to_core, to_core_vjp),
    decay=Decay.VECTOR,
    readout=Readout.SLOTS,
    state=StateFormat(SlotState, pack=pack_state, unpack=unpack_state, wide=True),
)


@public(SPEC, Samples({"s": "share"}))
def gsa(q: Any, k: Any, v: Any, s: Any, g: Any = None, **options: Unpack[Options]) -> Any:
    """Gated slot attention: softmax over slots, each of which decays and takes in keys and values.

        W_t = W_{t-1} diag(e^{g_t}) + k_t^T s_t
        S_t = diag(e^{g_t}) S_{t-1} + s_t^T v_t
        out_t = softmax(scale q_t W_t) S_t

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    s      (..., T, H, M)    weights of the token in the M slots
    g      (..., T, H, M)    log decay of the slots, <= 0, -inf empties one; None: log(1 - s), the paper's, s <= 1

    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and the state if return_state: a SlotState
    (S (..., H, M, V), W (..., H, K, M)).
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state twice, decay VECTOR (on the value axis of W), erase NONE. Common options:
    linattn_np.Options. Zhang et al., arXiv 2409.07146.
    """


# attention with bounded memory control: the slots' weights are a running softmax


def _shares(c: Call) -> Shares:
    """The shares of the tokens, computed once a call; N_0 = 0 without a state."""
    if "shares" not in vars(c):
        state = getattr(c, "state", None)
        c.shares = shares(c.xp, c.s, _zeros(c) if state is None else state.N, c.sequences, c.dtype)
    return c.shares


def _zeros(c: Call) -> Array:
    """N_0 of a call without a state."""
    lead, where = c.lead, device(c.v)
    return constant_zeros(c.xp, (*lead, *c.s.shape[-2:]), c.dtype, where)


def abc_to_core(c: Call) -> SlotInputs:
    """s = e^{s_t} / N_t, g = log(N_{t-1} / N_t): gsa's."""
    at = _shares(c)
    return SlotInputs(c.q, c.k, c.v, at.share, at.g)


def abc_to_core_vjp(c: Call, d: SlotInputs) -> dict[str, Array]:
    """The transpose of the shares; N_0 of a given state has its part."""
    ds, dN_0 = shares_vjp(c.xp, _shares(c), d.s, d.g, c.sequences, c.state is not None)
    grads = {"q": d.q, "k": d.k, "v": d.v, "s": ds}
    return grads if c.state is None else grads | {"state": dN_0}


def abc_pack_state(c: Call, state: Any) -> tuple[Array, Array] | None:
    if state is None:
        return None
    check_state(c.name, state.N, c.sizes, "H M", "state.N")
    return _memories(c, state)


def abc_unpack_state(c: Call, state: tuple[Array, Array]) -> BoundedState:
    """N = N_0 + sum of e^s."""
    return BoundedState(*state, _sums_after(c, c.sequences))


def _sums_after(c: Call, sequences: Items[Sequence]) -> Array:
    """N after the last token of each sequence: (..., H, M), of a ragged batch (N, H, M)."""
    ends = [_shares(c).after(s) for s in sequences]
    if not c.is_ragged:
        return ends[0]
    return c.xp.stack([c.xp.reshape(N, N.shape[-2:]) for N in ends], axis=0)


def abc_unpack_state_vjp(c: Call, state: Any, dstate: Any) -> tuple[tuple[Array, Array], dict[str, Array]]:
    """dN reaches every s_t, times e^{s_t}, and N_0."""
    xp, dN = c.xp, dstate.N
    if not c.is_ragged:
        ds = last_sum_vjp(xp, c.s, dN[..., None, :, :], c.dtype)
    else:
        each = [last_sum_vjp(xp, c.s[..., q.start : q.stop, :, :], dN[q.row, ...], c.dtype) for q in c.sequences]
        ds = xp.concat(each, axis=-3)
    return (dstate.S, dstate.W), {"s": ds, "state": dN}


def abc_unpack_states(c: Call, state: tuple[Array, Array], prefixes: list[Sequence]) -> BoundedState:
    if not prefixes:
        return BoundedState(*state, c.xp.zeros((*state[0].shape[:-3], *c.s.shape[-2:]), dtype=c.dtype))
    if c.is_ragged:
        return BoundedState(*state, _sums_after(c, prefixes))
    return BoundedState(*state, c.xp.stack([_shares(c).after(p) for p in prefixes], axis=-3))


def abc_unpack_states_vjp(
    c: Call, state: Any, dstates: Any, prefixes: list[Sequence]
) -> tuple[tuple[Array, Array], dict[str, Array]]:
    """dN of a position reaches the tokens before it, times e^{s_t}, and N_0."""
    xp, e, ragged = c.xp, c.xp.exp(cast(c.xp, c.s, c.dtype)), c.is_ragged
    ds: list[Array] = []
    dN_0: list[Array] = []
    for q in c.sequences:
        given = {p.stop: dstates.N[n, ...] if ragged else dstates.N[..., n, :, :]
                 for n, p in enumerate(prefixes) if p.row == q.row}  # fmt: skip
        dN, parts = xp.zeros((*c.batch, *e.shape[-2:]), dtype=e.dtype, device=device(e)), []
        for (_, start, stop), _ in reversed(segments(q, sorted(given))):
            dN = dN + given.get(stop, 0.0) if stop > start else dN
            parts.append(e[..., start:stop, :, :] * dN[..., None, :, :])
        dN_0.append(dN + given.get(q.start, 0.0))
        ds += reversed(parts)
    begin = xp.stack([xp.reshape(N, N.shape[-2:]) for N in dN_0], axis=0) if ragged else dN_0[0]
    return (dstates.S, dstates.W), {"s": xp.concat(ds, axis=-3), "state": begin}


def abc_log_decays(c: Call) -> None:
    """None: the averages have weights, which add."""


def abc_log_decays_vjp(c: Call, d: Array) -> dict[str, Array]:
    return {}


def abc_pack_state_vjp(c: Call, d: tuple[Array, Array], other: Array | None) -> BoundedState:
    return BoundedState(*d, other)


ABC = VariantSpec(
    name="abc",
    called="Bounded memory control",
    sentence="Softmax over slots that hold weighted averages of keys and values.",
    equation="w_t = e^{s_t} / sum_{l <= t} e^{s_l};  W_t = W_{t-1} diag(1 - w_t) + k_t^T w_t;  "
    "S_t = diag(1 - w_t) S_{t-1} + w_t^T v_t;  out_t = softmax(scale q_t W_t) S_t",
    paper="Peng et al., ABC: Attention with Bounded-memory Control, arXiv 2110.02488",
    arrays={**{n: SPEC.arrays[n] for n in "qkv"}, "s": ArgSpec("T H M", "logits of the slots' weights")},
    change=ChangeOfVariables(abc_to_core, abc_to_core_vjp),
    decay=Decay.VECTOR,
    readout=Readout.SLOTS,
    state=StateFormat(
        BoundedState,
        None,
        abc_pack_state,
        abc_unpack_state,
        abc_unpack_state_vjp,
        abc_pack_state_vjp,
        abc_unpack_states,
        abc_unpack_states_vjp,
        wide=True,
        log_decays=(abc_log_decays, abc_log_decays_vjp),
    ),
)


@public(ABC, Samples({"s": "logit"}))
def abc(q: Any, k: Any, v: Any, s: Any, **options: Unpack[Options]) -> Any:
    """Attention with bounded memory control: softmax over slots that hold weighted averages of keys and values.

        w_t = e^{s_t} / (N_0 + sum over l <= t of e^{s_l})
        W_t = W_{t-1} diag(1 - w_t) + k_t^T w_t
        S_t = diag(1 - w_t) S_{t-1} + w_t^T v_t
        out_t = softmax(scale q_t W_t) S_t

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    s      (..., T, H, M)    logits of the token's weights in the M slots; -inf: weight 0

    It is gsa with a decay that makes every slot an average. scale=None means K**-0.5.
    Returns out (..., T, max(Hq, H), V), and the state if return_state: a BoundedState (S (..., H, M, V),
    W (..., H, K, M), N (..., H, M)), N the sum of e^s so far (so s should stay below 80 in float32).
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state twice, decay VECTOR (on the value axis of W), erase NONE. Common options:
    linattn_np.Options. Peng et al., arXiv 2110.02488.
    """
