"""Variants whose queries and keys are rotated by their position: a complex decay e^{g + i theta} of channel pairs.

    q_t <- q_t R^t,  k_t <- k_t R^t,  R rotates the channels (2 p, 2 p + 1) by theta_p
    (q_i R^i) (k_j R^j)^T = q_i R^{i-j} k_j^T

A call numbers its tokens from 1, and the returned state is rotated to the frame of its last token: its key axis is
rotated by -T theta. The next call therefore numbers from 1 again; no position is passed on, and angles do
not grow with the length of the history. The rotation of the final state has its own transpose, with a term in dtheta.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from ...matrix_state.types import Inputs
from ...ops.rotary import rotate, rotate_rows, rotate_vjp, rotation, rows_angle_vjp
from ...runtime.arrays import Array, cast, device, is_cupy, is_numpy, over_tokens, sum_dtype
from ...runtime.constants import constant_array, host_constants
from ...runtime.shapes import Sequence, check_state
from ...spec import ArgSpec, ChangeOfVariables, StateFormat, Variables

THETA = ArgSpec(
    "P", "angle per token of the channel pairs, 2 P <= K; None: 10000^{-linspace(0, 1, K // 2)}", optional=True
)


def _angles(c: Variables, dtype: Any = None) -> Array:
    """theta (P,) in `dtype`; None: that of sums."""
    xp = c.xp
    if c.theta is not None:
        if 2 * c.theta.shape[0] > c.sizes.K:
            raise ValueError(
                f"{c.name}: theta has shape {tuple(c.theta.shape)}, expected (P,) with 2 P <= K = {c.sizes.K}"
            )
        return cast(xp, c.theta, sum_dtype(xp, c.theta) if dtype is None else dtype)
    P, like = c.sizes.K // 2, next(x for x in (getattr(c, "x", None), getattr(c, "v", None)) if x is not None)
    wide, where = sum_dtype(xp, like), device(like)
    dtype = wide if dtype is None else dtype

    def make() -> Array:
        return cast(xp, 10000.0 ** -(xp.arange(P, dtype=wide, device=where) / max(P - 1, 1)), dtype)

    return constant_array(xp, ("theta", P, str(dtype)), where, make)


def _lengths(c: Variables) -> list[int]:
    return [s.stop - s.start for s in c.sequences]


def _positions(c: Variables, angles: Array) -> Array:
    """Positions 1, 2, ... in each sequence: (T, 1, 1)."""
    xp, lengths = c.xp, _lengths(c)

    def make() -> Array:
        return xp.concat([xp.arange(1, n + 1, dtype=angles.dtype, device=device(angles)) for n in lengths])

    found = host_constants.once(("positions", *lengths), make) if is_numpy(xp) else make()
    return found[:, None, None]


def _ends(c: Variables, angles: Array) -> Array:
    """The length of each sequence: (), or (N, 1, 1, 1) for a ragged batch."""
    lengths = _lengths_of(c, angles, c.sequences)
    return c.xp.reshape(lengths, ()) if c.sizes.ragged is None else lengths


def _lengths_of(c: Variables, angles: Array, sequences: Iterable[Sequence]) -> Array:
    """The lengths of sequences or prefixes: (n, 1, 1, 1)."""
    lengths = [s.stop - s.start for s in sequences]
    return c.xp.asarray(lengths, dtype=angles.dtype, device=device(angles))[:, None, None, None]


def rotates_state(c: Variables) -> bool:
    """Whether the core rotates the state of a call, by -theta: of one token on CuPy arrays, whose kernel does.

    The state is then in the frame of that token, and q and k are not rotated.
    """
    plain = c.sizes.T == 1 and c.sizes.ragged is None and c.options["return_states_at"] is None
    return is_cupy(c.xp) and c.kernels and plain and c.options.get("causal", True)


class Rotated(NamedTuple):
    """The change of variables `base`, followed by the rotation of queries and keys."""

    base: ChangeOfVariables[Inputs]

    def to_core(self, c: Variables) -> Inputs:
        if rotates_state(c):
            return self.base.to_core(c)._replace(theta=_angles(c, c.dtype))
        x, angles = self.base.to_core(c), _angles(c)
        turn = rotation(c.xp, angles, _positions(c, angles), c.dtype)
        if c.sizes.ragged is None and c.sizes.T:
            c.last_turn = turn[:, -1, ...]
        q, k = self._rotated(c, x, turn)
        return x._replace(q=q, k=k)

    def _rotated(self, c: Variables, x: Inputs, turn: Array) -> tuple[Array, ...]:
        return tuple(None if y is None else rotate(c.xp, y, turn, c.dtype) for y in (x.q, x.k))

    def to_core_vjp(self, c: Variables, d: Inputs) -> dict[str, Array]:
        """dq and dk are rotated back; dtheta = sum over tokens of t times the gradient of the token's angle."""
        if rotates_state(c):
            grads = self.base.to_core_vjp(c, d)
            return grads if c.theta is None else grads | {"theta": d.theta}
        xp, angles = c.xp, _angles(c)
        at = _positions(c, angles)
        turn = rotation(xp, angles, at, c.dtype)
        if c.theta is None:
            back = [None if dy is None else rotate(xp, dy, turn, c.dtype, back=True) for dy in (d.q, d.k)]
            return self.base.to_core_vjp(c, d._replace(q=back[0], k=back[1]))
        rotated, back, dtheta = self._rotated(c, self.base.to_core(c), turn), [], 0.0
        for y, dy in zip(rotated, (d.q, d.k), strict=True):
            dx, dangle = (None, None) if y is None else rotate_vjp(xp, y, turn, dy, dtype=angles.dtype)
            back.append(dx)
            if dangle is not None:
                dangle = dangle * at
                dtheta = dtheta + over_tokens(xp, dangle)
        return self.base.to_core_vjp(c, d._replace(q=back[0], k=back[1])) | {"theta": dtheta}

    @property
    def change(self) -> ChangeOfVariables[Inputs]:
        return replace(self.base, to_core=self.to_core, to_core_vjp=self.to_core_vjp)


def pack_state(c: Variables, state: Any) -> Any:
    """Checks the initial state, which is in the frame of position 0."""
    if state is not None:
        check_state(c.name, state, c.sizes)
    return state


def _turn(c: Variables, angles: Array, lengths: Array) -> Array:
    """The rotation (2, ..., 1, P) of the last of `lengths` tokens; its inverse leads to the frame of that token."""
    return rotation(c.xp, angles[None, :], lengths, c.dtype)


def unpack_state(c: Variables, S: Array) -> Array:
    """S in the frame of the last token."""
    if rotates_state(c):
        return S
    if "last_turn" in vars(c):
        return rotate_rows(c.xp, S, c.last_turn, back=True)
    angles = _angles(c)
    return rotate_rows(c.xp, S, _turn(c, angles, _ends(c, angles)), back=True)


def unpack_state_vjp(c: Variables, S: Array, dstate: Array) -> tuple[Array, dict[str, Array]]:
    """dS is rotated back; the angle -T theta has its own gradient."""
    if rotates_state(c):
        return dstate, {}
    xp, angles = c.xp, _angles(c)
    ends = _ends(c, angles)
    turn = _turn(c, angles, ends)
    y = rotate(xp, xp.matrix_transpose(S), turn, c.dtype, back=True)
    dS, dangle = rotate_vjp(xp, y, turn, xp.matrix_transpose(dstate), back=True, dtype=angles.dtype)
    dangle = cast(xp, dangle, angles.dtype) * ends
    grads = {} if c.theta is None else {"theta": over_tokens(xp, dangle)}
    return xp.matrix_transpose(dS), grads


def unpack_states(c: Variables, S: Array, prefixes: list[Sequence]) -> Array:
    """States at positions, each in the frame of the last token before it."""
    angles = _angles(c)
    return rotate_rows(c.xp, S, _turn(c, angles, _lengths_of(c, angles, prefixes)), back=True)


def unpack_states_vjp(
    c: Variables, S: Array, dstates: Array, prefixes: list[Sequence]
) -> tuple[Array, dict[str, Array]]:
    """(gradient of S, gradients of arrays); see unpack_state_vjp."""
    xp, angles = c.xp, _angles(c)
    lengths = _lengths_of(c, angles, prefixes)
    turn = _turn(c, angles, lengths)
    dS = rotate_rows(xp, dstates, turn)
    if c.theta is None:
        return dS, {}
    dangle = xp.sum(rows_angle_vjp(xp, rotate_rows(xp, S, turn, back=True), dstates, angles.shape[0]), axis=-1)
    dangle = -cast(xp, dangle, angles.dtype) * lengths[..., 0]
    return dS, {"theta": over_tokens(xp, dangle)}


def pack_state_vjp(c: Variables, dS: Array, other: Any) -> Array:
    return dS


ROTATED_STATE = StateFormat(
    pack=pack_state,
    unpack=unpack_state,
    unpack_vjp=unpack_state_vjp,
    pack_vjp=pack_state_vjp,
    unpack_at=unpack_states,
    unpack_at_vjp=unpack_states_vjp,
    rotates=True,
)
