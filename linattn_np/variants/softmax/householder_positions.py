"""Householder positions: softmax attention of queries and keys less their own delta-rule outputs.

    P_t = P_{t-1} + w_t^T beta_t (0 - w_t P_{t-1}),   q~_t = q_t P_t,   k~_t = k_t P_t

is the delta rule with keys w and values 0 from the state P_0, the identity of a call without one: q~ and k~ are two of
its outputs, and the gradients of q, k, w, beta and P_0 are its gradients from those of q~ and k~.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Unpack

from ...call.dispatch import public
from ...core import Computation, Computed, Explained, StatesAt, register
from ...matrix_state import core as matrix_state
from ...matrix_state.types import EraseKey, Plan, Readout, both
from ...matrix_state.types import Inputs as DeltaRule
from ...ops.sums import added
from ...runtime.arrays import Array, cast, device, is_cupy
from ...runtime.constants import constant_array
from ...softmax.core import CORE
from ...softmax.types import HouseholderCache, HouseholderInputs, Inputs, KeyValueCache, SoftmaxPlan
from ...spec import Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import KEYS, QUERIES, VALUES
from ..shared.attention import ATTENTION, DIRECTIONS, MAP_STRENGTH, AttentionOptions, check_options

LONGEST_CHUNK = 128  # a longer chunk_size is one of attention alone


class HouseholderResiduals(NamedTuple):
    """Residuals of a forward pass."""

    plan: SoftmaxPlan
    has_state: bool
    maps: dict[str, Any]  # of the runs of the delta rule
    attention: Any  # the softmax core's


class Householder(Computation):
    """Two runs of the delta rule, then attention."""

    def forward(self, fn: str, x: HouseholderInputs, plan: SoftmaxPlan, state: Any, wanted: str | None) -> Computed:
        """(out, final state, residuals)."""
        P, zeros = _begin(plan, x) if state is None else state.P, _zeros(plan, x)
        x = x._replace(beta=_strengths(plan, x))
        mapped, ends, maps = dict[str, Array](), dict[str, Any](), dict[str, Any]()
        for name in _runs(plan, x):
            run, backend = (_delta_rule(x, name, zeros), _delta_plan(plan, name)), wanted
            if name == "P":
                backend = _backend_of_products(fn, *run, wanted)
            mapped[name], ends[name], maps[name] = matrix_state.forward(fn, *run, P, backend)
        given = None if state is None else _cache(state)
        out, end, attention = CORE.forward(fn, Inputs(mapped.get("q"), mapped["k"], x.v), plan, given, wanted)
        if isinstance(end, StatesAt):
            end = StatesAt(_with_product(end.end, ends["k"]), _with_product(end.at, ends["P"].at))
        else:
            end = _with_product(end, ends["k"])
        return out, end, HouseholderResiduals(plan, state is not None, maps, attention)

    def backward(self, residuals: HouseholderResiduals, dout: Array | None, dstate: Any) -> tuple[Any, Any]:
        """Gradients of the inputs and of the initial state."""
        (plan, has_state, maps, attention), (of_cache, of_products) = residuals, _parted(dstate)
        d, dbegin = CORE.backward(attention, dout, of_cache)
        found = [matrix_state.backward(maps["k"], d.k, of_products.end)]
        found += [matrix_state.backward(maps["q"], d.q, None)] if "q" in maps else []
        dq = found[1][0].q if "q" in maps else None
        if of_products.at is not None:
            found.append(matrix_state.backward(maps["P"], None, StatesAt(None, of_products.at)))
        total = functools.partial(functools.reduce, functools.partial(added, plan.xp))
        dw, dbeta = total([both(dx.k, dx.r) for dx, _ in found]), total([dx.beta for dx, _ in found])
        dx = HouseholderInputs(dq, found[0][0].q, d.v, dw, dbeta[..., 0])
        if not has_state:
            return dx, None
        return dx, HouseholderCache(dbegin.k, dbegin.v, total([dP for _, dP in found]), dbegin.length)

    def gives_states(self, fn: str, x: HouseholderInputs, plan: SoftmaxPlan, wanted: str | None) -> bool:
        """Where the delta rule does."""
        run = _delta_rule(x, "P", _zeros(plan, x)), _delta_plan(plan, "P")
        return matrix_state.gives_states(fn, *run, _backend_of_products(fn, *run, wanted))

    def reads_out(self, residuals: HouseholderResiduals) -> bool:
        """Backward reads the output."""
        return residuals.plan.normalize

    def explain(self, fn: str, x: HouseholderInputs, plan: SoftmaxPlan, wanted: str | None) -> Explained:
        """That of attention, with the operations of the maps."""
        found, zeros = CORE.explain(fn, Inputs(x.q, x.k, x.v), plan, wanted), _zeros(plan, x)
        runs = [_delta_rule(x, name, zeros) for name in _runs(plan, x)]
        maps = matrix_state.explain_memories(fn, runs, _delta_plan(plan, "k"), wanted)
        total = found.operations + maps.operations
        return found._replace(
            reason=f"{found.reason}; q and k mapped by the delta rule ({maps.backend}): {maps.reason}",
            operations=total,
            operations_per_token=found.operations_per_token * total / max(found.operations, 1.0),
        )


def _runs(plan: SoftmaxPlan, x: HouseholderInputs) -> list[str]:
    """The runs of the delta rule: those that map k and q, and one of the products at plan.states_at."""
    return ["k"] + ["q"] * (x.q is not None) + ["P"] * (plan.states_at is not None)


def _backend_of_products(fn: str, x: DeltaRule, plan: Plan, wanted: str | None) -> str | None:
    """That of the run which stores products at positions: array calls on a GPU where kernels store none."""
    return wanted if not is_cupy(plan.xp) or matrix_state.gives_states(fn, x, plan, wanted) else "chunks"


def _delta_rule(x: HouseholderInputs, name: str, zeros: Array) -> DeltaRule:
    """A run of the delta rule."""
    return DeltaRule(x._asdict().get(name), x.w, zeros, r=x.w, beta=x.beta[..., None])


def _delta_plan(plan: SoftmaxPlan, name: str) -> Plan:
    """The plan of a run."""
    C = min(plan.chunk_size, LONGEST_CHUNK) if isinstance(plan.chunk_size, int) else None
    return Plan(
        plan.xp, plan.dtype, 1.0, chunk_size=C, sequences=plan.sequences,
        gradients=plan.gradients, precision=plan.precision, states_at=plan.states_at if name == "P" else None,
        returns_state=plan.returns_state and name == "k", has_state=True, erase_key=EraseKey.KEY,
    )  # fmt: skip


def _zeros(plan: SoftmaxPlan, x: HouseholderInputs) -> Array:
    """The values (..., T, Hk, K), which outputs have the dtype of: that of k and v for kernels of a GPU."""
    if is_cupy(plan.xp):
        return plan.xp.zeros(x.w.shape, dtype=x.k.dtype if x.k.dtype == x.v.dtype else plan.dtype)
    return plan.xp.broadcast_to(plan.xp.zeros(x.w.shape[-1:], dtype=plan.dtype, device=device(x.w)), x.w.shape)


def _strengths(plan: SoftmaxPlan, x: HouseholderInputs) -> Array:
    """beta, in the dtype in which kernels of a GPU read it, once for all runs."""
    return cast(plan.xp, x.beta, plan.dtype) if is_cupy(plan.xp) else x.beta


def _begin(plan: SoftmaxPlan, x: HouseholderInputs) -> Array:
    """P_0, the identity of each head; of kernels of a GPU an array, once for all runs."""
    lead = (len(plan.sequences),) if plan.is_ragged else x.w.shape[:-3]
    K, dtype, where = x.w.shape[-1], plan.dtype, device(x.w)
    eye = constant_array(plan.xp, ("eye", K, str(dtype)), where, lambda: plan.xp.eye(K, dtype=dtype, device=where))
    P = plan.xp.broadcast_to(eye, (*lead, x.w.shape[-2], *eye.shape))
    return plan.xp.ascontiguousarray(P) if is_cupy(plan.xp) else P


def _cache(state: HouseholderCache) -> KeyValueCache:
    return KeyValueCache(state.k, state.v, state.length)


def _with_product(end: KeyValueCache | None, P: Array) -> HouseholderCache | None:
    return None if end is None else HouseholderCache(end.k, end.v, P, end.length)


def _parted(dstate: Any) -> tuple[Any, StatesAt]:
    """(gradients of the caches of keys and values, of the products P); None for those that are not given."""
    if not isinstance(dstate, StatesAt):
        return (None, StatesAt(None, None)) if dstate is None else (_cache(dstate), StatesAt(dstate.P, None))
    caches, products = zip(*((None, None) if d is None else (_cache(d), d.P) for d in dstate), strict=True)
    return StatesAt(*caches), StatesAt(*products)


register(Householder(), HouseholderInputs)


def to_core(c: Call) -> HouseholderInputs:
    """The core's arrays are the caller's."""
    return HouseholderInputs(c.q, c.k, c.v, c.w, c.beta)


def to_core_vjp(c: Call, d: HouseholderInputs) -> dict[str, Array]:
    """Gradients by public name."""
    return d._asdict()


SPEC = VariantSpec(
    name="householder_positions",
    sentence="Softmax attention of queries and keys less their own delta-rule outputs, whose keys and values are w.",
    equation="P_t = (I - beta_t w_t^T w_t) P_{t-1};  p_tj ~ e^{scale (q_t P_t) . (k_j P_j)}, sum_j p_tj = 1;  "
    "out_t = sum_j p_tj v_j",
    paper="with reflections a case of PaTH: Yang et al., PaTH Attention, arXiv 2505.16381",
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES, "w": DIRECTIONS, "beta": MAP_STRENGTH},
    change=ChangeOfVariables(to_core, to_core_vjp),
    core=CORE,
    readout=Readout.SOFTMAX,
    state=StateFormat(
        HouseholderCache,
        wide=True,
        unit=frozenset("P"),
        axes={"k": "L Hk K", "v": "L H V", "P": "Hk K K", "length": ""},
    ),
    options=ATTENTION,
    check_options=check_options,
)


# weak maps: P shrinks by the product of all |1 - beta|
@public(SPEC, Samples({"w": "direction", "beta": "share"}, ({}, {"window": 9})))
def householder_positions(q: Any, k: Any, v: Any, w: Any, beta: Any, **options: Unpack[AttentionOptions]) -> Any:
    """Softmax attention of queries and keys less their own delta-rule outputs, whose keys and values are w.

        P_t = (I - beta_t w_t^T w_t) P_{t-1}, P_0 = I
        p_tj ~ e^{scale (q_t P_t) . (k_j P_j)}, sum_j p_tj = 1
        out_t = sum_j p_tj v_j

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    w      (..., T, Hk, K)   directions of the maps, of unit length
    beta   (..., T, Hk)      strengths of the maps in [0, 2]; 2 is a reflection, and then this is path_attention

    window: a query reads its own token and the window - 1 before it; None: all of the past.
    normalize: False leaves the denominator out.
    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and a HouseholderCache if return_state, with slots as
    in softmax_attention, keys times P of their token, and P of the last one.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: softmax. Common options: linattn_np.Options.
    With reflections a case of PaTH: Yang et al., PaTH Attention, arXiv 2505.16381.
    """
