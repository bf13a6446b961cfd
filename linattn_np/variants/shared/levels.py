"""Log-linear variants: the arrays, the change of variables and the state that they share."""

from __future__ import annotations

from typing import Any

from ...matrix_state.readouts.levels.calls import LevelInputs
from ...matrix_state.types import LevelState
from ...runtime.arrays import Array, cast
from ...runtime.shapes import check_state
from ...spec import ArgSpec, Call, ChangeOfVariables, StateFormat

LEVELS = ArgSpec("T H levels", "weight of each level")


def to_core(c: Call) -> LevelInputs:
    """Decay and strength with an axis of one channel."""
    beta = None if (strength := vars(c).get("beta")) is None else strength[..., None]
    return LevelInputs(c.q, c.k, c.v, c.g[..., None], beta, c.lam)


def to_core_vjp(c: Call, d: LevelInputs) -> dict[str, Array]:
    grads = {"q": d.q, "k": d.k, "v": d.v, "g": d.g[..., 0], "lam": d.lam}
    return grads if d.beta is None else grads | {"beta": d.beta[..., 0]}


def pack_state(c: Call, state: Any) -> LevelState | None:
    if state is None:
        return None
    check_state(c.name, state.S, c.sizes, AXES["S"], "state.S")
    check_state(c.name, state.position, c.sizes, AXES["position"], "state.position", counts=True)
    return LevelState(cast(c.xp, state.S, c.dtype), state.position)


def unpack_state(c: Call, state: LevelState) -> LevelState:
    return state


AXES = {"S": "H levels K V", "position": ""}
STATE = StateFormat(
    LevelState,
    pack=pack_state,
    unpack=unpack_state,
    axes=AXES,
    no_summary="levels are places of tokens from the first one on: a span alone does not know its own",
)


def change(**more: Any) -> ChangeOfVariables[LevelInputs]:
    """The change of variables."""
    return ChangeOfVariables(to_core, to_core_vjp, **more)
