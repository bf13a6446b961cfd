"""MesaNet: every query is answered by the regularised least-squares fit of all that was written."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.readouts.solved import SolvedInputs, least_entry
from ...matrix_state.readouts.systems import Solver
from ...matrix_state.types import Decay, Readout, SolvedState
from ...runtime.arrays import Array, cast
from ...runtime.shapes import check_state
from ...runtime.values import is_finite, is_word, shown
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import LOG_DECAY, POSITIVE, QUERIES, VALUES
from ..shared.similarity import check_whole


def to_core(c: Call) -> SolvedInputs:
    """g, beta and ridge in the dtype of the computation, g and beta with an axis of one channel; rows as given."""
    xp = c.xp
    g, beta, ridge = (cast(xp, x, c.dtype) for x in (c.g, c.beta, c.ridge))
    o = c.options
    free = o["solver"] is None
    exact = free or o["solver"] == "exact"
    same = all(y is None or y.dtype == c.k.dtype for y in (c.q, c.v))
    solver = Solver(exact, o["iterations"], float(o["tolerance"]), free, c.k.dtype if same else None)
    least = least_entry(c.name, xp, ridge)
    ridge = ridge[None, ...] if ridge.ndim == 2 else ridge
    return SolvedInputs(c.q, c.k, c.v, g[..., None], beta[..., None], ridge, solver, least)


def to_core_vjp(c: Call, d: SolvedInputs) -> dict[str, Array]:
    dridge = d.ridge[0, ...] if c.ridge.ndim == 2 else d.ridge
    return {"q": d.q, "k": d.k, "v": d.v, "g": d.g[..., 0], "beta": d.beta[..., 0], "ridge": dridge}


def pack_state(c: Call, state: Any) -> tuple[Array, Array] | None:
    if state is None:
        return None
    check_state(c.name, state.S, c.sizes, "H K V", "state.S")
    check_state(c.name, state.Z, c.sizes, "H K K", "state.Z")
    return cast(c.xp, state.S, c.dtype), cast(c.xp, state.Z, c.dtype)


def unpack_state(c: Call, state: tuple[Array, Array]) -> SolvedState:
    return SolvedState(*state)


def check_options(fn: str, options: dict[str, Any]) -> None:
    solver, tolerance = options["solver"], options["tolerance"]
    if solver is not None and not is_word(solver, ("exact", "conjugate_gradients")):
        raise ValueError(f"{fn}: solver is {shown(solver)}, expected None, 'exact' or 'conjugate_gradients'")
    check_whole(fn, options, "iterations")
    if not is_finite(tolerance) or not 0 <= tolerance < 1:
        raise ValueError(f"{fn}: tolerance is {shown(tolerance)}, expected a number >= 0 and < 1")


class MesaNetOptions(Options, total=False):
    """The common options, and how the systems are solved."""

    solver: str | None
    iterations: int
    tolerance: float


SPEC = VariantSpec(
    name="mesa_net",
    called="MesaNet",
    sentence="Every query reads the regularised least-squares fit of what was written.",
    equation="Z_t = e^{g_t} Z_{t-1} + beta_t k_t^T k_t;  S_t = e^{g_t} S_{t-1} + beta_t k_t^T v_t;  "
    "out_t = scale q_t (Z_t + diag(ridge))^{-1} S_t",
    paper="von Oswald et al., MesaNet, arXiv 2506.05233",
    arrays={
        "q": QUERIES,
        "k": ArgSpec("T Hk K", "keys"),
        "v": VALUES,
        "g": ArgSpec("T H", "log decay, <= 0", limits=LOG_DECAY),
        "beta": ArgSpec("T H", "weight of the pair (k, v), >= 0", limits=POSITIVE),
        "ridge": ArgSpec("T H K|H K", "added to the diagonal of Z, >= 0", limits=POSITIVE),
    },
    change=ChangeOfVariables(to_core, to_core_vjp),
    decay=Decay.SCALAR,
    readout=Readout.SOLVED,
    scaled=False,
    state=StateFormat(SolvedState, pack=pack_state, unpack=unpack_state),
    options={"solver": None, "iterations": 30, "tolerance": 1e-7},
    check_options=check_options,
)
SAMPLES = Samples(
    {"k": "unit", "ridge": "ridge"}, ({}, {"solver": "conjugate_gradients", "iterations": 60, "tolerance": 0.0})
)


@public(SPEC, SAMPLES)
def mesa_net(q: Any, k: Any, v: Any, g: Any, beta: Any, ridge: Any, **options: Unpack[MesaNetOptions]) -> Any:
    """MesaNet: every query is answered by the regularised least-squares fit of all that was written.

        Z_t = e^{g_t} Z_{t-1} + beta_t k_t^T k_t
        S_t = e^{g_t} S_{t-1} + beta_t k_t^T v_t
        x_t (Z_t + diag(ridge_t)) = q_t,   out_t = scale x_t S_t

    q      (..., T, Hq, K)              queries
    k      (..., T, Hk, K)              keys
    v      (..., T, H, V)               values
    g      (..., T, H)                  log decay, <= 0
    beta   (..., T, H)                  weight of the pair (k, v), >= 0
    ridge  (..., T, H, K) or (H, K)     added to the diagonal of Z, >= 0

    (Z_t + diag(ridge_t))^{-1} S_t is the W that makes 1/2 sum_j beta_j e^{g_{j+1} + .. + g_t} |k_j W - v_j|^2 plus
    1/2 <W, diag(ridge_t) W> least. solver="exact" forms and solves every system, at a cost of K^3 a token and head;
    "conjugate_gradients" takes K^2 a step: at most `iterations` from x = 0, and a row stops when
    |q - x (Z + diag(ridge))| <= tolerance |q|, a tolerance below the eps of the dtype of the computation meaning eps:
    further steps would follow rounding errors. Backward solves in the same way. None is "exact", except in 16 bits on a
    GPU for K up to 128: there it is conjugate gradients to the rounding errors of products, in at most 2 K steps.
    The state is a SolvedState(S (..., H, K, V), Z (..., H, K, K)); Z is symmetric and positive semidefinite.

    scale=None means 1. Returns out (..., T, max(Hq, H), V), and the state if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit, and ValueError for a ridge below 0,
    or 0 where that leaves a system singular (which is looked for, by eigenvalues, only if some ridge is 0): without a
    state, the systems of the first K - 1 tokens are. Kernels of a GPU do not look at the ridge, which would wait for
    the device: outputs and gradients of singular systems are arbitrary there, inf or NaN; check=True finds a ridge
    below 0.
    Core: matrix_state, decay SCALAR, erase NONE. Common options: linattn_np.Options.
    von Oswald et al., MesaNet, arXiv 2506.05233.
    """
