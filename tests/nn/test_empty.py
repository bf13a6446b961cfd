"""Axes without anything: results are those of array calls, and none is memory that was not written."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans
from linattn_np.nn import samples
from linattn_np.nn.declaration import PIECES

CALLS = [(name, n, letter) for name in PIECES for n, _ in enumerate(samples.options_of(name))
         for letter in samples.SIZES]  # fmt: skip


@pytest.fixture
def poisoned(monkeypatch):
    """np.empty gives NaN."""
    real = np.empty

    def empty(shape, dtype=np.float64, *more, **named):
        found = real(shape, dtype, *more, **named)
        found[...] = np.nan if found.dtype.kind == "f" else 3
        return found

    la.clear_cache()
    monkeypatch.setattr(plans, "by_key", {})
    monkeypatch.setattr(np, "empty", empty)


def parts(result):
    return [y for y in (result if isinstance(result, tuple) else (result,)) if y is not None]


def found_of(name, arrays, options):
    """The results of a call and its gradients, three times; or the kind of its error."""
    fn, each = getattr(la.nn, name), []
    if name == "merge":
        fn = la.merge
    try:
        for _ in range(3):
            result, pullback = la.vjp(fn, **arrays, **options)
            d = [np.cos(np.arange(y.size, dtype=y.dtype)).reshape(y.shape) for y in parts(result)]
            each.append([*parts(fn(**arrays, **options)), *parts(result), *parts(pullback(*d))])
    except (ValueError, TypeError) as error:
        return str(error)
    for one in each[1:]:
        assert all(x.tobytes() == y.tobytes() for x, y in zip(one, each[0], strict=True))
    return each[0]


@pytest.mark.parametrize(("name", "n", "letter"), CALLS, ids=lambda x: str(x))
def test_an_empty_axis_gives_zeros_where_no_kernel_writes(name, n, letter, poisoned, monkeypatch):
    options, sizes = samples.options_of(name)[n], dict(samples.SIZES)
    sizes[letter] = (2, 0) if letter == "..." else 0
    monkeypatch.setattr(samples, "SIZES", sizes)
    try:
        arrays = samples.sample(name, np.random.default_rng(0), options)
    except ValueError:
        pytest.skip("no number of a table of no rows")
    arrays = {k: x.astype(np.float32) if x.dtype.kind == "f" else x for k, x in arrays.items()}
    found = found_of(name, arrays, options)
    expected = found_of(name, arrays, {**options, "backend": "reference"})
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
        return
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("cuts", [[0, 0], [0, 0, 3, 3], [0, 2, 2, 2]], ids=str)
def test_sequences_of_no_tokens(cuts, width, poisoned):
    T, N, D = cuts[-1], len(cuts) - 1, 5
    draw = np.random.default_rng(0).standard_normal
    x, weight = draw((1, T, D)).astype(np.float32), draw((D, width)).astype(np.float32)
    state = draw((N, width + 1, D)).astype(np.float32)
    calls = {"short_conv": {"x": x, "weight": weight, "state": state}, "token_shift": {"x": x, "state": state},
             "mixed": {"x": x, "mix": weight[:, 0].copy(), "state": state},
             "rotary": {"x": x.reshape(1, T, 1, D), "angle": x[..., :2].copy()}}  # fmt: skip
    for name, arrays in calls.items():
        options = {"cu_seqlens": cuts} | ({"cumulative": True} if name == "rotary" else {"return_state": True})
        name = "token_shift" if name == "mixed" else name
        found = found_of(name, arrays, options)
        expected = found_of(name, arrays, {**options, "backend": "reference"})
        assert not isinstance(found, str)
        for y, z in zip(found, expected, strict=True):
            np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-5)
