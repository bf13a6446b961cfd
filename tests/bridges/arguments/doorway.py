"""A program: every entry with arguments of wrong shapes, dtypes and numbers. Prints faults.

    python -m tests.bridges.arguments.doorway ops | torch | variants [NAME ...]

A row is an entry, its arrays by axes and what else it takes. From it come wrong arrays: one shorter and one longer in
each axis, an axis less and one more, another dtype, no array at all. Each must raise a TypeError or ValueError that
begins with the entry and names an argument, unless the axes still agree. A crash ends the program.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

SIZES = {"1": 1, "B": 2, "T": 5, "D": 6, "W": 3, "S": 4, "H": 4, "V": 2, "G": 2, "K": 3, "N": 3}
SIZES |= {"W-1": SIZES["W"] - 1, "C": SIZES["H"] * SIZES["V"] + 2 * SIZES["G"] * SIZES["K"], "I": 8, "O": 7}
SIZES["P"] = SIZES["I"] + SIZES["C"] + SIZES["H"]
RNG = np.random.default_rng(0)


OPTIONAL = frozenset(("bias", "dy", "seq_idx", "initial_states", "residual", "cu_seqlens", "z", "D", "dt_bias",
                      "conv1d_bias", "rmsnorm_weight", "outproj_weight", "outproj_bias"))  # fmt: skip


class Row(NamedTuple):
    """An entry: its name in errors, the call, axes by array, other arguments by array and name."""

    name: str
    call: Callable[..., Any]
    axes: Mapping[str, str]
    whole: Mapping[str, Any] = {}  # arrays of whole numbers
    numbers: tuple[tuple[str, Any], ...] = ()  # (array, wrong numbers in a right shape)
    bring: Callable[[np.ndarray], Any] = np.asarray
    takes_objects: bool = True  # False: torch itself refuses arguments that are not tensors


def agree(axes: Mapping[str, str], given: Mapping[str, Any]) -> bool:
    """Whether the shapes of arrays bind each letter to one size."""
    sizes: dict[str, int] = {}
    for name, x in given.items():
        letters = next((each.split() for each in axes[name].split("|") if len(each.split()) == x.ndim), None)
        if letters is None or any(sizes.setdefault(a, n) != n for a, n in zip(letters, x.shape, strict=True)):
            return False
    T = sizes.get("T", 0)
    offsets = next((x.tolist() for name, x in given.items() if axes[name] == "offsets"), [0, T])
    if any(sizes.get(a, SIZES[a]) != SIZES[a] for a in "1P") or len(offsets) < 2 or (offsets[0], offsets[-1]) != (0, T):
        return False
    W, K, S = (sizes.get(a) for a in ("W", "W-1", "S"))
    return W is None or (W > 0 and K in (None, W - 1) and (S is None or S >= W - 1))


def changed(x: np.ndarray) -> Iterator[tuple[str, Any]]:
    """Wrong arrays made from one."""
    for axis in range(x.ndim):
        last = x.take([-1], axis)
        yield f"axis {axis} shorter", x.take(range(x.shape[axis] - 1), axis)
        yield f"axis {axis} longer", np.concatenate([x, last], axis)
        yield f"axis {axis} empty", x.take([], axis)
        yield f"axis {axis} left out", x.take(0, axis)
        yield f"axis {axis} twice", np.stack([x, x], axis)
    yield "one axis more", x[..., None]
    for kind in ("complex64", "bool", *(("int32",) if x.dtype.kind == "f" else ("float32",))):
        yield kind, (x.real if x.dtype.kind == "c" else x).astype(kind)


def findings(row: Row) -> Iterator[str]:
    """What is wrong with an entry."""
    shapes = {n: [SIZES[a] for a in axes.split("|")[0].split()] for n, axes in row.axes.items() if n not in row.whole}
    good = {n: RNG.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()} | dict(row.whole)
    bring = {n: row.bring(x) for n, x in good.items()}
    row.call(**bring)
    wrongs = [(n, how, x) for n in good for how, x in changed(good[n])] + [(n, "numbers", x) for n, x in row.numbers]
    for name, how, x in wrongs:
        legal = x.dtype == good[name].dtype and how != "numbers" and agree(row.axes, {**good, name: x})
        if (text := outcome(row, name, {**bring, name: row.bring(x)}, legal)) is not None:
            yield f"{row.name}({name}, {how} {x.dtype}{x.shape}): {text}"
    for name in good:
        may_lack = name in OPTIONAL or row.axes[name] == "D"
        for x in ("nothing", 3, *(() if may_lack else (None,))) if row.takes_objects else ():
            if (text := outcome(row, name, {**bring, name: x}, False)) is not None:
                yield f"{row.name}({name}={x!r}): {text}"


def outcome(row: Row, name: str, given: Mapping[str, Any], legal: bool) -> str | None:
    """What an entry did that it must not do with these arrays."""
    try:
        row.call(**given)
    except (TypeError, ValueError) as error:
        first, _, rest = str(error).partition(": ")
        if legal:
            return f"refused: {error}"
        return None if first == row.name and any(n in rest for n in row.axes) else f"unclear: {error!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if legal else "accepted"


# rows


def of_ops() -> Iterator[Row]:
    from linattn_np.ops.cpu import gated_norm
    from linattn_np.ops.gated_norm import GatedNorm

    how, axes = GatedNorm(group=1), {"x": "B T D", "gate": "B T D", "weight": "D"}
    yield Row("gated_rms_norm", lambda **a: gated_norm.gated_rms_norm(**a, how=how), axes)
    yield Row("gated_rms_norm", lambda **a: gated_norm.gated_rms_norm_vjp(**a, how=how), axes | {"dy": "B T D"})


def of_torch() -> Iterator[Row]:
    import torch

    from linattn_np.bridges import causal_conv1d, mamba_ssm, modules
    from linattn_np.ops.gated_norm import GatedNorm

    for wants in (False, True):

        def bring(x: np.ndarray, wants: bool = wants) -> Any:
            return torch.from_numpy(np.array(x)).requires_grad_(wants and x.dtype.kind == "f")

        def conv(fn: Any, **given: Any) -> Callable[..., Any]:
            return lambda **a: fn(**a, **given, activation="silu")

        row = {"x": "B D T", "weight": "D W", "bias": "D"}
        seq = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
        yield Row(
            "causal_conv1d_fn",
            conv(causal_conv1d.causal_conv1d_fn),
            row | {"seq_idx": "B T"},
            {"seq_idx": seq},
            bring=bring,
        )
        yield Row(
            "causal_conv1d_fn",
            conv(causal_conv1d.causal_conv1d_fn, return_final_states=True),
            row | {"initial_states": "B D W-1"},
            bring=bring,
        )
        flat = {"x": "N T D", "weight": "D W", "bias": "D", "residual": "N T D"}
        offsets = np.array([0, 2, 2, 5])
        wrong = ([0, 3, 2, 5], [0, 2, 6], [-1, 5], [0, -3, 5], [1, 5], [0, 4], [0, 1 << 40])
        yield Row("causal_conv1d", conv(modules.causal_conv1d), flat, bring=bring)
        one = {n: axes.replace("N", "1") for n, axes in flat.items()} | {"cu_seqlens": "offsets"}
        yield Row(
            "causal_conv1d",
            conv(modules.causal_conv1d),
            one,
            {"cu_seqlens": offsets},
            tuple(("cu_seqlens", np.array(n)) for n in wrong),
            bring,
        )
        norm = {"x": "B T D", "gate": "B T D", "weight": "D"}
        yield Row("gated_rms_norm", lambda **a: modules.gated_rms_norm(**a, how=GatedNorm(group=1)), norm, bring=bring)
        yield Row("rms_norm_gated", modules.rms_norm_gated, {"x": "B T D", "g": "B T D", "weight": "D"}, bring=bring)
    plain = lambda x: torch.from_numpy(np.array(x))  # noqa: E731
    row = {"weight": "D W", "bias": "D", "conv_state": "B D S"}
    for axes in ("B D T|B D", "B D|B D T"):
        yield Row("causal_conv1d_update", causal_conv1d.causal_conv1d_update, {"x": axes} | row, bring=plain)
    yield from of_mamba(mamba_ssm, plain)


def of_mamba(mamba_ssm: Any, bring: Any) -> Iterator[Row]:
    scan = {"x": "B T H V", "dt": "B T H", "A": "H", "B": "B T G K", "C": "B T G K", "D": "H", "z": "B T H V",
            "dt_bias": "H"}  # fmt: skip
    seq = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
    for more, whole in (({"initial_states": "B H V K"}, {}), ({"seq_idx": "B T"}, {"seq_idx": seq})):
        yield Row(
            "mamba_chunk_scan_combined",
            lambda **a: mamba_ssm.mamba_chunk_scan_combined(**a, chunk_size=8, return_final_states=True),
            scan | more,
            whole,
            bring=bring,
        )

    def update(**a: Any) -> Any:
        wide = {n: x[..., None].expand(*x.shape, SIZES["V"]) if getattr(x, "ndim", 0) else x
                for n, x in a.items() if n in ("dt", "dt_bias")}  # fmt: skip
        A = a["A"][..., None, None].expand(*a["A"].shape, SIZES["V"], SIZES["K"]) if hasattr(a["A"], "ndim") else a["A"]
        return mamba_ssm.selective_state_update(**a | wide | {"A": A})

    yield Row("selective_state_update", update, {
        "state": "B H V K", "x": "B H V", "dt": "B H", "A": "H", "B": "B G K", "C": "B G K", "D": "H", "z": "B H V",
        "dt_bias": "H"}, bring=bring)  # fmt: skip
    split = {"zxbcdt": "B T P", "conv1d_weight": "C W", "conv1d_bias": "C", "dt_bias": "H", "A": "H", "D": "H",
             "rmsnorm_weight": "I", "outproj_weight": "O I", "outproj_bias": "O"}  # fmt: skip
    sizes = {"chunk_size": 8, "headdim": SIZES["V"], "ngroups": SIZES["G"]}
    yield Row(
        "mamba_split_conv1d_scan_combined",
        lambda **a: mamba_ssm.mamba_split_conv1d_scan_combined(**a, **sizes),
        split,
        bring=bring,
    )


# variants: an accepted call must equal the reference


def of_variant(fn: Any) -> Iterator[str]:
    """What a variant, its pullback and its state do with wrong arrays."""
    import linattn_np as la

    arrays = la.testing.sampling.sample(fn, RNG, B=(2,), T=5, H=2, K=4, V=3)
    good = {n: x.astype(np.complex64 if x.dtype.kind == "c" else np.float32) for n, x in arrays.items()}
    (out, state), pullback = la.vjp(fn, **good, return_state=True)
    for name, x in good.items():
        for how, wrong in changed(x):
            yield from compared(fn, f"{name}, {how} {wrong.dtype}{wrong.shape}", good | {name: wrong})
    parts = state if isinstance(state, tuple) else (state,)
    for n, part in enumerate(parts):
        for how, wrong in changed(part):
            new = wrong if len(parts) == 1 else type(state)(*parts[:n], wrong, *parts[n + 1 :])
            yield from compared(fn, f"state {n}, {how} {wrong.dtype}{wrong.shape}", good | {"state": new})
            yield from refused(fn, f"dstate {n}, {how}", pullback, (out, new), wrong.shape == part.shape)
    for how, wrong in changed(out):
        yield from refused(fn, f"dout, {how}", pullback, (wrong,), wrong.shape == out.shape)


def compared(fn: Any, what: str, given: dict[str, Any]) -> Iterator[str]:
    """Nothing where a call is refused clearly, or where its result is that of the reference."""
    try:
        found = fn(**given)
    except (TypeError, ValueError) as error:
        if not str(error).startswith(f"{fn.__name__}: "):
            yield f"{fn.__name__}({what}): unclear: {error!r}"
        return
    except Exception as error:
        yield f"{fn.__name__}({what}): {error!r}"
        return
    wanted = fn(**given, backend="reference")
    if not np.allclose(found, wanted, 1e-3, 1e-3, equal_nan=True):
        yield f"{fn.__name__}({what}): differs from the reference by {np.abs(found - wanted).max()}"


def refused(fn: Any, what: str, call: Callable[..., Any], given: tuple[Any, ...], legal: bool) -> Iterator[str]:
    """Nothing where a call with wrong arrays raises clearly."""
    try:
        call(*given)
    except (TypeError, ValueError) as error:
        if not str(error).startswith(f"{fn.__name__}: "):
            yield f"{fn.__name__}({what}): unclear: {error!r}"
    except Exception as error:
        yield f"{fn.__name__}({what}): {error!r}"
    else:
        if not legal:
            yield f"{fn.__name__}({what}): accepted"


def main(group: str, names: list[str]) -> int:
    faulthandler.enable()
    if group == "variants":
        import linattn_np as la

        found = [text for fn in la.VARIANTS if not names or fn.__name__ in names for text in of_variant(fn)]
    else:
        rows = of_ops() if group == "ops" else of_torch()
        found = [text for row in rows if not names or row.name in names for text in findings(row)]
    print("\n".join(found), end="")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
