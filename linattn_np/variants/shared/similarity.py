"""Variants with feature maps of queries and keys; the output may be divided by the sum of similarities.

    S_t = S_{t-1} + phi(k_t)^T v_t          z_t = z_{t-1} + phi(k_t)
    out_t = scale phi(q_t) S_t              normalize=True: the same / (scale phi(q_t) z_t^T + eps)

One change of variables for all of them: queries and keys become their features, and with the sum the values gain a
column of ones, so that the last column of q S is q z. A map that compiled loops can evaluate is passed to the core with
unmapped queries and keys (matrix_state/readouts/mapped.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...call.options import Options
from ...matrix_state.readouts.averages import AveragedInputs, apart
from ...matrix_state.readouts.mapped import MappedInputs
from ...matrix_state.types import Inputs, NormalisedState
from ...ops import averages, random_maps
from ...ops.feature_maps import FeatureMap, identity, identity_vjp
from ...ops.product import multiple
from ...ops.sums import sum_of_groups
from ...runtime.arrays import NARROW, STORAGE, Array, cast, device, dtype_name, is_cupy, is_numpy
from ...runtime.shapes import check_state
from ...runtime.values import LARGEST, is_finite, is_whole, shown
from ...spec import Call, ChangeOfVariables, StateFormat

CoreInputs = Inputs | MappedInputs | AveragedInputs
WIDEST_NARROW = 256  # features that are stored in bfloat16: kernels take more of them in float32


class SimilarityOptions(Options, total=False):
    """The common options, normalize (divide by the sum of similarities), causal, and eps (added to that sum)."""

    normalize: bool
    causal: bool
    eps: float


def defaults(normalize: bool = True) -> dict[str, Any]:
    """These options with their defaults."""
    return {"normalize": normalize, "causal": True, "eps": 0.0}


def check_eps(fn: str, options: dict[str, Any]) -> None:
    eps = options["eps"]
    if not is_finite(eps) or eps < 0:
        raise ValueError(f"{fn}: eps is {shown(eps)}, expected a finite number >= 0")


def check_whole(fn: str, options: dict[str, Any], *names: str, least: int = 1) -> None:
    """Check options that are whole numbers from `least`: counts and seeds."""
    for name in names:
        n = options[name]
        if not is_whole(n, least):
            raise ValueError(f"{fn}: {name} is {shown(n)}, expected a whole number from {least}")
        if n > LARGEST:
            raise ValueError(f"{fn}: {name} is {shown(n)}, expected at most {LARGEST}")


class Similarity(NamedTuple):
    """The change of variables of one variant; maps(c) gives the feature maps of q and of k for the call c."""

    maps: Callable[[Call], tuple[FeatureMap, FeatureMap]]

    def to_core(self, c: Call, is_narrow: bool | None = None) -> CoreInputs:
        """phi(q), phi(k), v or [v, 1]; or q, k, v and the map for the core.   is_narrow: see rows_are_narrow."""
        xp, (map_q, map_k) = c.xp, self.maps(c)
        eps = float(c.options["eps"]) if c.options["normalize"] else None
        x = MappedInputs(c.q, c.k, c.v, None, map_k, eps, rows_are_narrow(c) if is_narrow is None else is_narrow)
        if self.is_left_to_the_core(c, map_q, x):
            if not c.kernels or not is_cupy(c.xp):
                return x
            from . import pairs  # imports another core, which other calls do not need

            return pairs.PairInputs(*x) if pairs.takes(x, c.plan) else x
        features = self.mapped(c, self.stored(c))
        if eps is not None and self.sums_are_apart(c):
            return AveragedInputs(**features, v=c.v, eps=eps)
        v = averages.with_ones(xp, c.v, c.dtype) if c.options["normalize"] else c.v
        return Inputs(**features, v=v)

    def stored(self, c: Call) -> Any:
        """The kernels of features in bfloat16, if they make those of a call of queries, keys and values.

        Features are padded with zeros, and states with rows of zeros. More of them than WIDEST_NARROW are panels of the
        core, which have as many queries and keys as values.
        """
        if c.q is None or not is_cupy(c.xp) or c.options["return_states_at"] is not None:
            return None
        map_q, map_k = self.maps(c)
        steps = getattr(map_k[0], "steps", None)
        if steps is None or steps != getattr(map_q[0], "steps", None) or not _factors_are_narrow(c):
            return None
        fits = steps.width(c.k.shape[-1]) <= WIDEST_NARROW or max(c.q.shape[-2], c.k.shape[-2]) <= c.v.shape[-2]
        return random_maps.kernels_of(steps, c.q, c.k) if fits else None

    def mapped(self, c: Call, stored: Any = None) -> dict[str, Array]:
        """phi(q) and phi(k) by name.   stored: kernels that make them."""
        map_q, map_k = self.maps(c)
        c.stored = stored
        if stored is not None:
            c.steps, c.shared = map_k[0].steps, {"k": c.k, "q": c.q}  # type: ignore[attr-defined]
            if c.steps.width(c.k.shape[-1]) > WIDEST_NARROW:
                c.shared = {n: stored.of_heads(x, c.v.shape[-2]) for n, x in c.shared.items()}
            c.features = dict(zip(c.shared, stored.features(c.xp, c.steps, [*c.shared.values()]), strict=True))
            return c.features
        k = _mapped(c, "k", map_k)
        q = None if c.q is None else _mapped(c, "q", map_q)
        c.features = {"k": k, "q": q}
        if q is not None and q.shape[-1] != k.shape[-1]:
            raise ValueError(
                f"{c.name}: feature_map makes q {q.shape[-1]} and k {k.shape[-1]} wide, expected one width"
            )
        return c.features

    def is_left_to_the_core(self, c: Call, map_q: FeatureMap, x: MappedInputs) -> bool:
        """Whether the core evaluates the map: one with steps (causal, NumPy arrays), or a polynomial of q . k."""
        steps = getattr(x.map[0], "steps", None)
        if steps is None or steps != getattr(map_q[0], "steps", None) or c.k.shape[-1] == 0:
            return False
        if x.is_polynomial and self.stored(c) is not None:
            return False
        if _is_one_token(c) and sums_are_apart(c) and getattr(c, "state", None) is not None:
            return False  # a float32 state is rounded already: float32 features are as exact
        return (is_numpy(c.xp) and c.options["causal"]) or x.is_polynomial

    def sums_are_apart(self, c: Call) -> bool:
        """sums_are_apart of a call; calls of many tokens with a polynomial of q . k have a column for them."""
        if not sums_are_apart(c) or _is_one_token(c):
            return sums_are_apart(c)
        map_q, map_k = self.maps(c)
        return not self.is_left_to_the_core(c, map_q, MappedInputs(c.q, c.k, c.v, map=map_k))

    def to_core_vjp(self, c: Call, d: CoreInputs) -> dict[str, Array]:
        """Applies the transposes of the maps; the column of ones has no gradient."""
        if isinstance(d, MappedInputs):
            return {"q": d.q, "k": d.k, "v": d.v[..., : c.v.shape[-1]]}
        return {"v": d.v[..., : c.v.shape[-1]]} | self.mapped_vjp(c, {"q": d.q, "k": d.k})

    def mapped_vjp(self, c: Call, d: Mapping[str, Array]) -> dict[str, Array]:
        """Gradients of q and k from the gradients of their features."""
        xp, (map_q, map_k), grads = c.xp, self.maps(c), dict[str, Array]()
        if c.stored is not None:
            dphi = [cast(xp, d[n], x.dtype) for n, x in c.shared.items()]
            dx = c.stored.features_vjp(xp, c.steps, [*c.shared.values()], [*c.features.values()], dphi)
            return {n: sum_of_groups(xp, y, getattr(c, n).shape[-2]) for n, y in zip(c.shared, dx, strict=True)}
        for name, x, (f, f_vjp), dphi in (("k", c.k, map_k, d["k"]), ("q", c.q, map_q, d["q"])):
            if x is not None and f_vjp is identity_vjp:
                grads[name] = dphi
            elif x is not None:
                known = [c.features[name]] if getattr(f_vjp, "takes_features", False) else []
                if is_cupy(xp) and dtype_name(dphi) in NARROW and not _takes_any_dtype(c, f):
                    dphi, *known = (cast(xp, y, c.dtype) for y in (dphi, *known))
                direct = dtype_name(dphi) in NARROW and _takes_any_dtype(c, f)
                dx, who = f_vjp(x if direct else cast(xp, x, c.dtype), dphi, *known), "f_vjp of feature_map"
                grads[name] = _checked(c, f"d{name}", dx, who)
                if tuple(grads[name].shape) != tuple(x.shape):
                    raise ValueError(
                        f"{c.name}: {who} makes d{name} of shape "
                        f"{tuple(grads[name].shape)}, expected {tuple(x.shape)}, the shape of {name}"
                    )
        return grads

    def pack_state(self, c: Call, state: Any) -> Array | None:
        """(S, z) as one (..., H, M, V + 1) state; M is the width of the mapped keys."""
        if state is None:
            return None
        if not c.options["normalize"]:
            self.check(c, state)
            return self.padded(c, state, -2)
        self.check(c, state.S, "state.S")
        self.check(c, state.z, "state.z", "H M")
        if self.sums_are_apart(c):
            return self.padded(c, cast(c.xp, state.S, c.dtype), -2), self.padded(c, cast(c.xp, state.z, c.dtype), -1)
        return averages.with_sums(c.xp, state.S, state.z, c.dtype, view=c.sizes["T"] > 0)

    def padded(self, c: Call, state: Array, axis: int) -> Array:
        """With zeros for the features that are stored beside those of the map."""
        more = self.more_features(c)
        if not more:
            return state
        shape = list(state.shape)
        shape[axis] = more
        none = c.xp.zeros(tuple(shape), dtype=state.dtype, device=device(state))
        return c.xp.concat([state, none], axis=axis)

    def more_features(self, c: Call) -> int:
        """The number of zeros that are stored beside the features of a row."""
        stored, K = self.stored(c), c.k.shape[-1]
        if stored is None:
            return 0
        steps = self.maps(c)[1][0].steps  # type: ignore[attr-defined]
        return stored.width(steps, K) - steps.width(K)

    def unpack_state(self, c: Call, S: Any) -> Any:
        """The public state."""
        M = S[0].shape[-2] if isinstance(S, tuple) else S.shape[-2]
        if more := self.more_features(c):
            M -= more
            S = (S[0][..., :M, :], S[1][..., :M]) if isinstance(S, tuple) else S[..., :M, :]
        if isinstance(S, tuple):
            return NormalisedState(*S)
        return NormalisedState(S[..., :-1], S[..., -1]) if c.options["normalize"] else S

    def check(self, c: Call, state: Array, name: str = "state", axes: str = "H M V") -> None:
        if "M" not in c.sizes:  # the width of the mapped keys
            f: Any = self.maps(c)[1][0]
            if getattr(f, "steps", None) is not None:
                c.sizes["M"] = f.steps.width(c.k.shape[-1])
            else:
                c.sizes["M"] = int(_checked(c, "k", f(cast(c.xp, c.k[..., :0, :, :], c.dtype))).shape[-1])
        check_state(c.name, state, c.sizes, axes, name)

    @property
    def change(self) -> ChangeOfVariables[CoreInputs]:
        return ChangeOfVariables(self.to_core, self.to_core_vjp, divide, divide_vjp)

    @property
    def state(self) -> StateFormat:
        return StateFormat(NormalisedState, "normalize", self.pack_state, self.unpack_state, wide=True)


def rows_are_narrow(c: Call) -> bool:
    """Whether queries and keys are stored in 16 bits, and CUDA kernels may take float32 features of them."""
    return is_cupy(c.xp) and all(x is None or dtype_name(x) in NARROW for x in (c.q, c.k))


def _takes_any_dtype(c: Call, f: Any) -> bool:
    """Whether a map f reads 16-bit rows itself."""
    return is_cupy(c.xp) and c.dtype == c.xp.float32 and getattr(f, "takes_any_dtype", False)


def _factors_are_narrow(c: Call) -> bool:
    """Whether the products of a call are those of many tokens whose factors are stored in bfloat16."""
    known = is_cupy(c.xp) and c.kernels and c.options.get("causal", True) and c.dtype == c.xp.float32
    names = {dtype_name(x) for x in (c.q, c.k, c.v) if x is not None}
    return known and names == {"bfloat16"} and c.sizes["T"] > 1 and apart(c.plan, c.sizes["T"])


def _features_are_narrow(c: Call, f: Any) -> bool:
    """Whether features are stored in bfloat16: those of maps of our own, of numbers, exponentials or waves.

    In a polynomial of a degree above the second terms would cancel.
    """
    steps = getattr(f, "steps", None)
    own = getattr(f, "takes_any_dtype", False) or (steps is not None and steps.kind != "monomials")
    return own and _factors_are_narrow(c)


def _mapped(c: Call, name: str, feature_map: FeatureMap) -> Array:
    x = getattr(c, name)
    if feature_map[0] is identity:  # unchanged, also in 16 bits
        return x
    f: Any = feature_map[0]
    narrow = _features_are_narrow(c, f)
    if not _takes_any_dtype(c, f):
        y = f(cast(c.xp, x, c.dtype))
    elif narrow:
        y = f(x, x.dtype)
    else:
        y = f(x)
    y = _checked(c, name, y)
    if narrow and y.dtype != x.dtype and y.shape[-1] <= WIDEST_NARROW:
        y = multiple(c.xp, 1.0, y, x.dtype)
    if tuple(y.shape[:-1]) != tuple(x.shape[:-1]):
        raise ValueError(
            f"{c.name}: feature_map makes {name} of shape {tuple(x.shape)} one of {tuple(y.shape)}, "
            "expected all axes but the last to stay"
        )
    return y


def _checked(c: Call, name: str, y: Any, who: str = "feature_map") -> Array:
    """The result of a map, checked to be an array of a supported dtype."""
    if not hasattr(y, "shape") or not hasattr(y, "dtype"):
        raise TypeError(f"{c.name}: {who} makes {name} a {type(y).__qualname__}, expected an array")
    if dtype_name(y) not in STORAGE:
        raise TypeError(f"{c.name}: {who} makes {name} of dtype {dtype_name(y)}, expected one of {', '.join(STORAGE)}")
    return y


def divide(c: Call, out: Array) -> Array:
    """Numerator / (denominator + eps), 0 for a zero denominator; unchanged if the core has divided."""
    return averages.divide(c.xp, out, c.options["eps"])[0] if _is_left(c, out) else out


def _is_left(c: Call, out: Array) -> bool:
    """Whether the core's outputs still have the denominator as their last column."""
    return out.shape[-1] > c.v.shape[-1]


def divide_vjp(c: Call, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """d num = dout / den, d den = -<dout, num / den> / den."""
    if not _is_left(c, out):
        return dout, {}
    return averages.divided_vjp(c.xp, out, c.options["eps"], dout, c.dtype), {}


def sums_are_apart(c: Call) -> bool:
    """Whether sums of weights are no column of the state: one token, or many, on CuPy arrays."""
    known = is_cupy(c.xp) and c.kernels and c.options["return_states_at"] is None
    return known and c.options.get("causal", True) and apart(c.plan, c.sizes["T"])


def _is_one_token(c: Call) -> bool:
    return c.sizes["T"] == 1 and not c.is_ragged
