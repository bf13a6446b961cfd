"""Variants whose queries and keys are rotated by their position: a complex decay e^{g + i theta} of channel pairs.

    q_t <- q_t R^t,  k_t <- k_t R^t,  R rotates the channels (2 p, 2 p + 1) by theta_p
    (q_i R^i) (k_j R^j)^T = q_i R^{i-j} k_j^T

Kernels of NumPy arrays rotate the rows as they load them; of other arrays they are rotated first.

A call numbers its tokens from 1, and the returned state is rotated to the frame of its last token: its key axis is
rotated by -T theta. The next call therefore numbers from 1 again; no position is passed on, and angles do
not grow with the length of the history. The rotation of the final state has its own transpose, with a term in dtheta.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...matrix_state.types import Inputs
from ...ops.product import product
from ...ops.rotary import angles_vjp, rotate, rotate_rows, rotation, rows_angle_vjp
from ...ops.sums import added, over_tokens
from ...runtime.arrays import NARROW, Array, cast, device, dtype_name, is_cupy, is_numpy, sum_dtype
from ...runtime.constants import constant_array
from ...runtime.shapes import Sequence, check_state
from ...spec import ArgSpec, Call, ChangeOfVariables, StateFormat

THETA = ArgSpec(
    "P", "angle per token of the channel pairs, 2 P <= K; None: 10000^{-linspace(0, 1, K // 2)}", optional=True
)


def _angles(c: Call, dtype: Any = None) -> Array:
    """theta (P,) in `dtype`; None: that of sums."""
    xp = c.xp
    if c.theta is not None:
        if 2 * c.theta.shape[0] > c.sizes["K"]:
            raise ValueError(
                f"{c.name}: theta has shape {tuple(c.theta.shape)}, expected (P,) with 2 P <= K = {c.sizes['K']}"
            )
        return cast(xp, c.theta, sum_dtype(xp, c.theta) if dtype is None else dtype)
    P, like = c.sizes["K"] // 2, next(x for x in (getattr(c, "x", None), getattr(c, "v", None)) if x is not None)
    wide, where = sum_dtype(xp, like), device(like)
    dtype = wide if dtype is None else dtype

    def make() -> Array:
        return cast(xp, 10000.0 ** -(xp.arange(P, dtype=wide, device=where) / max(P - 1, 1)), dtype)

    return constant_array(xp, ("theta", P, str(dtype)), where, make)


def _dtype(c: Call, x: Array) -> Any:
    """The dtype of rotated rows: that of the computation, but of rows of 16 bits for CUDA kernels their own."""
    return x.dtype if is_cupy(c.xp) and c.kernels and dtype_name(x) in NARROW else c.dtype


def _lengths(c: Call) -> list[int]:
    return [s.stop - s.start for s in c.sequences]


def _positions(c: Call, angles: Array) -> Array:
    """Positions 1, 2, ... in each sequence: (T, 1, 1)."""
    xp, lengths = c.xp, _lengths(c)
    most = 1 << max(*lengths, 1).bit_length()  # one constant for many lengths
    make = lambda: xp.arange(1, most + 1, dtype=angles.dtype, device=device(angles))  # noqa: E731
    every = constant_array(xp, ("positions", most, str(angles.dtype)), device(angles), make)
    found = every[: lengths[0]] if len(lengths) == 1 else xp.concat([every[:n] for n in lengths])
    return found[:, None, None]


def _ends(c: Call, angles: Array) -> Array:
    """The length of each sequence: (), or (N, 1, 1, 1) for a ragged batch."""
    lengths = _lengths_of(c, angles, c.sequences)
    return c.xp.reshape(lengths, ()) if not c.is_ragged else lengths


def _lengths_of(c: Call, angles: Array, sequences: Iterable[Sequence]) -> Array:
    """The lengths of sequences or prefixes: (n, 1, 1, 1)."""
    lengths = [s.stop - s.start for s in sequences]
    return c.xp.asarray(lengths, dtype=angles.dtype, device=device(angles))[:, None, None, None]


def rotates_state(c: Call) -> bool:
    """Whether the core rotates the state of a call, by -theta: of one token on CuPy arrays, whose kernel does.

    The state is then in the frame of that token, and q and k are not rotated.
    """
    plain = c.sizes["T"] == 1 and not c.is_ragged and c.options["return_states_at"] is None
    return is_cupy(c.xp) and c.kernels and plain and c.options.get("causal", True)


class Rotated(NamedTuple):
    """The change of variables `base`, followed by the rotation of queries and keys."""

    base: ChangeOfVariables[Inputs]

    def to_core(self, c: Call) -> Inputs:
        if rotates_state(c):
            return self.base.to_core(c)._replace(theta=_angles(c, c.dtype))
        x, angles = self.base.to_core(c), _angles(c)
        cos_sin = rotation(c.xp, angles, _positions(c, angles), c.dtype)
        if not c.is_ragged and c.sizes["T"]:
            c.last_rotation = cos_sin[:, -1, ...]
        if is_numpy(c.xp):  # the core rotates
            rows = np.moveaxis(cos_sin, 0, -2).reshape(*cos_sin.shape[1:-1], 2 * cos_sin.shape[-1])
            return x._replace(rotation=rows) if rows.shape[-1] else x
        q, k = self._rotated(c, x, cos_sin)
        return x._replace(q=q, k=k)

    def _rotated(self, c: Call, x: Inputs, cos_sin: Array) -> tuple[Array | None, ...]:
        return tuple(None if y is None else rotate(c.xp, y, cos_sin, _dtype(c, y)) for y in (x.q, x.k))

    def to_core_vjp(self, c: Call, d: Inputs) -> dict[str, Array]:
        """dq and dk are rotated back; dtheta = sum over tokens of t times the gradient of the token's angle."""
        if rotates_state(c):
            grads = self.base.to_core_vjp(c, d)
            return grads if c.theta is None else grads | {"theta": d.theta}
        xp, angles = c.xp, _angles(c)
        at = _positions(c, angles)
        if is_numpy(xp):
            grads = self.base.to_core_vjp(c, d)
            if c.theta is None:
                return grads
            if d.rotation is None:
                return grads | {"theta": np.zeros_like(angles)}
            return grads | {"theta": over_tokens(xp, product(xp, d.rotation, at, dtype=angles.dtype))}
        cos_sin = rotation(xp, angles, at, c.dtype)
        back = [None if dy is None else rotate(xp, dy, cos_sin, dy.dtype, back=True) for dy in (d.q, d.k)]
        grads = self.base.to_core_vjp(c, d._replace(q=back[0], k=back[1]))
        if c.theta is None:
            return grads
        wide = rotation(xp, angles, at, angles.dtype) if is_cupy(xp) else cos_sin
        parts = []
        for name, dy in ((self.base.query, d.q), (self.base.key, d.k)):
            if name is not None and dy is not None and (x := getattr(c, name)) is not None:
                dangle = angles_vjp(xp, x, wide, dy, angles.dtype)
                parts.append(over_tokens(xp, product(xp, dangle, at, dtype=angles.dtype)))
        return grads | {"theta": functools.reduce(functools.partial(added, xp), parts)}

    @property
    def change(self) -> ChangeOfVariables[Inputs]:
        return replace(self.base, to_core=self.to_core, to_core_vjp=self.to_core_vjp)


def pack_state(c: Call, state: Any) -> Any:
    """Checks the initial state, which is in the frame of position 0."""
    if state is not None:
        check_state(c.name, state, c.sizes)
    return state


def _rotation(c: Call, angles: Array, lengths: Array) -> Array:
    """The rotation (2, ..., 1, P) of the last of `lengths` tokens; its inverse leads to the frame of that token."""
    return rotation(c.xp, angles[None, :], lengths, c.dtype)


def _last_rotation(c: Call) -> Array:
    """The rotation of the last token of each sequence."""
    if "last_rotation" in vars(c):
        return c.last_rotation
    angles = _angles(c)
    return _rotation(c, angles, _ends(c, angles))


def unpack_state(c: Call, S: Array) -> Array:
    """S in the frame of the last token."""
    return S if rotates_state(c) else rotate_rows(c.xp, S, _last_rotation(c), back=True)


def unpack_state_vjp(c: Call, S: Array, dstate: Array) -> tuple[Array, dict[str, Array]]:
    """dS is rotated back; the angle -T theta has its own gradient."""
    if rotates_state(c):
        return dstate, {}
    cos_sin, lengths = _last_rotation(c), _lengths(c)
    return _unpacked_vjp(c, S, dstate, cos_sin, lengths[0] if len(lengths) == 1 else c.sequences)


def _unpacked_vjp(
    c: Call, S: Array, dS: Array, cos_sin: Array, of: Iterable[Sequence] | int
) -> tuple[Array, dict[str, Array]]:
    """(gradient of the core's states S, that of theta) for states rotated by -n theta, n tokens each.

    of: n, or the sequences or prefixes whose lengths they are.
    """
    xp, d = c.xp, rotate_rows(c.xp, dS, cos_sin)
    if c.theta is None:
        return d, {}
    angles, factor = _angles(c), -1.0 * of if isinstance(of, int) else -1.0
    dangle = rows_angle_vjp(xp, rotate_rows(xp, S, cos_sin, back=True), dS, angles.shape[0], angles.dtype, factor)
    if not isinstance(of, int):
        dangle = dangle * _lengths_of(c, angles, of)[..., 0]
    return d, {"theta": over_tokens(xp, dangle)}


def unpack_states(c: Call, S: Array, prefixes: list[Sequence]) -> Array:
    """States at positions, each in the frame of the last token before it."""
    angles = _angles(c)
    return rotate_rows(c.xp, S, _rotation(c, angles, _lengths_of(c, angles, prefixes)), back=True)


def unpack_states_vjp(c: Call, S: Array, dstates: Array, prefixes: list[Sequence]) -> tuple[Array, dict[str, Array]]:
    """(gradient of S, gradients of arrays); see unpack_state_vjp."""
    angles = _angles(c)
    return _unpacked_vjp(c, S, dstates, _rotation(c, angles, _lengths_of(c, angles, prefixes)), prefixes)


def pack_state_vjp(c: Call, dS: Array, other: Any) -> Array:
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
