"""Products of decays down to the smallest normal number: each element of a result is right, forward and backward.

Everything is positive where the variant lets it be, so that no sum cancels. The state is large and nothing is written,
or tokens write and only the last one reads: the result is one product of decays times numbers near 1.
"""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from tests.cases import PLAIN, draw, enumerate_parts, parts, parts_like

T = 64  # a whole chunk
DECAYS = ("g", "gv", "A", "slopes", "f")
DECAYING = [c for c in PLAIN if c.given.keys() & set(DECAYS)]
# per dtype: log of the product of all decays, what multiplies the state, relative tolerance
SCALES = {np.float64: (-700.0, 1e60, 1e-10), np.float32: (-86.0, 1e10, 2e-4)}
# terms of both signs cancel: the sum has fewer digits
SIGNED = [
    c
    for c in DECAYING
    if not {"q", "k", "v"} <= c.given.keys() or {"theta", "f", "s"} & c.given.keys() or c.spec.state.wide
]
FORMS = ({"chunk_size": 1}, {"chunk_size": 16}, {"chunk_size": 64}, {"chunk_size": "parallel"}, {})


def positive(case, dtype, product):
    """Positive arrays whose decays are within 1% of the T-th root of e^product; and a positive state."""
    arrays, state = draw(case, T=T, B=(1,), K=6, V=5, seed=3)
    rng = np.random.default_rng(4)
    for name, x in arrays.items():
        if name not in case.given:
            continue
        arrays[name] = np.abs(x) + 0.1
        if name in DECAYS:
            arrays[name] = product / T * rng.uniform(0.99, 1.01, x.shape)
        if name == "slopes":
            arrays[name] = -arrays[name]
        if name == "f":  # log sigmoid f is the decay
            arrays[name] = -np.log(np.expm1(-arrays[name]))
        if name == "dt":  # A softplus dt is
            arrays[name] = np.full_like(x, np.log(np.e - 1))
        if name in ("dt_bias", "angle"):  # dt reaches angles that are not 0
            arrays[name] = np.zeros_like(x)
        if name in ("beta", "a", "b"):  # so little is erased that signs stay
            arrays[name] = 0.01 * np.abs(x)
    arrays = {n: x.astype(dtype) if isinstance(x, np.ndarray) else x for n, x in arrays.items()}
    return arrays, parts_like(
        state, [S if S.dtype.kind == "i" else (np.abs(S) + 0.1).astype(dtype) for S in parts(state)]
    )


def results(case, arrays, state, large, **options):
    """Out, state and gradients by name; the last token alone has a cotangent, a large one."""
    result, pullback = la.vjp(case.fn, **arrays, **case.options, state=state, return_state=True, **options)
    dout = np.zeros_like(result[0])
    dout[:, -1] = large
    grads = pullback(dout)
    found = dict(enumerate_parts("out", result[0])) | dict(enumerate_parts("state", result[1]))
    for name, d in grads._asdict().items():
        found |= dict(enumerate_parts("d" + name, d))
    return found


@pytest.mark.parametrize("dtype", list(SCALES), ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("what", ["a large state fades", "the last token asks"])
@pytest.mark.parametrize("case", DECAYING, ids=str)
def test_every_element_is_right(case, what, dtype):
    product, large, tolerance = SCALES[dtype]
    tolerance *= 100 if case.erases or case in SIGNED else 1  # something dropped would be off by 1
    arrays, state = positive(case, dtype, product)
    if what == "a large state fades":
        arrays[case.spec.change.value] = np.zeros_like(arrays[case.spec.change.value])
        state = parts_like(state, [S * dtype(large) if n == 0 else S for n, S in enumerate(parts(state))])
    wide = {n: x.astype(np.float64) if isinstance(x, np.ndarray) else x for n, x in arrays.items()}
    wide_state = parts_like(state, [S.astype(np.float64) for S in parts(state)])
    expected = results(case, wide, wide_state, large, backend="reference")
    for backend in ("chunks", None):
        for form in FORMS:
            found = results(case, arrays, state, large, backend=backend, **form)
            found.pop("dangle", None)  # a sum over all later tokens, in which large terms cancel
            for name, x in found.items():
                y, least = expected[name], 1e4 * np.finfo(dtype).tiny
                wrong = np.abs(x - y) > tolerance * np.abs(y) + least
                assert not wrong.any(), (name, backend, form, x[wrong][:3], y[wrong][:3])
