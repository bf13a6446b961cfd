"""Everything of the PyTorch bridge that autograd follows: variants, operators, pieces, adapters of other libraries."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from tests.bridges.small import RULE
from tests.cases import GROWING, PLAIN, cases_of, draw, one_per, parts

SMALL = {"T": 3, "B": (2,), "H": 2, "K": 4, "V": 3}
EACH = one_per(lambda spec: spec.name, PLAIN + [case for fn in GROWING for case in cases_of(fn)])


class Entry(NamedTuple):
    """fn(*tensors) -> a tensor or a tuple of them; name: in its errors, "" if it is torch operations alone."""

    id: str
    name: str
    fn: Callable[..., Any]
    tensors: tuple[Any, ...]

    def __str__(self) -> str:
        return self.id

    def given(self) -> list[Any]:
        """The tensors, which require grad."""
        return [x.clone().requires_grad_() for x in self.tensors]

    def loss(self, given: Any) -> Any:
        """A number that is not linear in the results."""
        return sum(real(y).square().sum() for y in parts(self.fn(*given)) if y.requires_grad)


def real(x: Any) -> Any:
    """A tensor; the real part of a complex one."""
    return x.real if x.is_complex() else x


def entries(dtype: str = "float64", **sizes: Any) -> list[Entry]:
    return [*(_variant(case, dtype, sizes) for case in EACH), *_around(dtype), *_adapters(dtype)]


def operators(dtype: str = "float64") -> list[Entry]:
    """The operators of traced calls: of a few variants, and of everything else."""
    import torch

    from linattn_np.bridges.torch import pieces_of_layers
    from linattn_np.bridges.torch.operators import TENSORS, library

    library()
    ours, found = torch.ops.linattn_np, []
    for case in one_per(lambda spec: (spec.erase, spec.readout, spec.state.parts), EACH):
        arrays, state = _drawn(case, dtype, {})
        options = json.dumps({**case.options, **{n: x for n, x in arrays.items() if isinstance(x, str)},
                              "return_state": True})  # fmt: skip
        names = [n for n, x in arrays.items() if not isinstance(x, str)]
        floats = [S for S in state if S.is_floating_point()]

        def call(operator: Any, case: Any, names: Any, state: Any, options: str, *given: Any) -> Any:
            named, own = dict(zip(names, given, strict=False)), iter(given[len(names) :])
            each = [named.get(n) for n in case.spec.arrays]
            state = [next(own) if S.is_floating_point() else S for S in state]  # counts have no gradient
            return tuple(operator(*each, state, *[None] * len(TENSORS), options))

        for name in (case.spec.name, f"{case.spec.name}_saving"):
            fn = functools.partial(call, getattr(ours, name), case, names, state, options)
            found.append(Entry(f"ops.{name}", case.spec.name, fn, (*(arrays[n] for n in names), *floats)))
    pieces_of_layers.library()
    x, taps, bias, gate = (normal(*shape, dtype=dtype) for shape in ((2, 5, 6), (6, 4), (6,), (2, 5, 6)))
    conv = json.dumps({"activation": "silu", "arrays": ["x", "weight", "bias"]})
    norm = json.dumps({"arrays": ["x", "gate", "weight"]})
    return [
        *found,
        Entry("ops.nn_short_conv", "short_conv", lambda *a: tuple(ours.nn_short_conv([*a], conv)), (x, taps, bias)),
        Entry("ops.nn_gated_norm", "gated_norm", lambda *a: tuple(ours.nn_gated_norm([*a], norm)), (x, gate, bias)),
    ]


def normal(*shape: int, dtype: str = "float64") -> Any:
    import torch

    x = np.random.default_rng(sum(shape)).standard_normal(shape)
    return torch.from_numpy(x).to(getattr(torch, dtype))


def _drawn(case: Any, dtype: str, sizes: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    import torch

    arrays, state = draw(case, **(SMALL | sizes), dtype=np.dtype(dtype))
    return ({n: x if isinstance(x, str) else torch.from_numpy(x) for n, x in arrays.items()},
            tuple(torch.from_numpy(np.asarray(S)) for S in parts(state)))  # fmt: skip


def _variant(case: Any, dtype: str, sizes: dict[str, Any]) -> Entry:
    arrays, _ = _drawn(case, dtype, sizes)
    words = {n: x for n, x in arrays.items() if isinstance(x, str)}
    names = [n for n in arrays if n not in words]

    def fn(*given: Any) -> Any:
        return case.fn(**dict(zip(names, given, strict=True)), **words, **case.options)

    return Entry(case.spec.name, case.spec.name, fn, tuple(arrays[n] for n in names))


def _around(dtype: str) -> list[Entry]:
    """The pieces."""
    from linattn_np.bridges import modules
    from linattn_np.bridges.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
    from linattn_np.ops.gated_norm import GatedNorm

    make = functools.partial(normal, dtype=dtype)
    x, weight, bias, past, gate = make(2, 6, 5), make(6, 4), make(6), make(2, 6, 3), make(2, 5, 6)
    first = GatedNorm(1e-5, "silu", True, 3)
    return [
        Entry("read", "read", la.read, (make(2, 3, 2, 4), make(2, 2, 4, 3))),
        Entry("convolution", "short_conv", causal_conv1d_fn, (x, weight)),
        Entry(
            "convolution with all",
            "short_conv",
            lambda x, w, b, s: causal_conv1d_fn(x, w, b, None, s, activation="silu"),
            (x, weight, bias, past),
        ),
        Entry("update", "short_conv", lambda x, w, b: causal_conv1d_update(x, past.clone(), w, b), (x, weight, bias)),
        Entry("norm", "gated_norm", modules.rms_norm_gated, (x.mT, gate, bias)),
        Entry(
            "norm without weight",
            "gated_norm",
            lambda x, g: modules.rms_norm_gated(x, g, None, activation="sigmoid"),
            (x.mT, gate),
        ),
        Entry("norm after gate", "gated_norm", lambda *a: modules.gated_rms_norm(*a, first), (x.mT, gate, bias)),
        Entry("l2norm", "l2_norm", modules.l2norm, (x,)),
    ]


def _adapters(dtype: str) -> list[Entry]:
    """One function of each library; all others are the same functions of ours."""
    from linattn_np.bridges import fla, mamba_ssm

    make = functools.partial(normal, dtype=dtype)
    q, k, v, beta = make(2, 3, 2, 4), make(2, 3, 2, 4) / 2, make(2, 3, 2, 3), make(2, 3, 2).abs()
    g = -beta
    x, dt, A, B = make(2, 3, 2, 3), make(2, 3, 2).abs(), -make(2).abs(), make(2, 3, 1, 4)
    return [
        Entry("fla", "gated_delta_rule", lambda *a: fla.FUNCTIONS["chunk_gated_delta_rule"](*a)[0], (q, k, v, g, beta)),
        Entry("mamba_ssm", "mamba2", lambda *a: mamba_ssm.mamba_chunk_scan_combined(*a, 16), (x, dt, A, B, B + 1)),
        Entry("step", "gated_delta_rule", lambda *a: la.step(RULE, *(y[:, 0] for y in a)), (q, k, v, g, beta)),
    ]
