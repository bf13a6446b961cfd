"""Formulas of NumPy arrays: a number has the same bits alone, among others, and in arrays of other strides."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from linattn_np.ops.cpu.formulas import OF_NUMBERS, compiled

ARRAYS = {"copy": 1, "scaled": 1, "capped": 1, "log_forget": 1, "log_rest": 1, "added": 2, "complement": 2,
          "step_size": 2, "capped_vjp": 2, "log_forget_vjp": 2, "skip_and_gate": 4,
          "log_decay_vjp": 4, "bounded_vjp": 4, "decay_vjp": 4}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", [name for name in OF_NUMBERS if not name.startswith("feature")])
def test_bits_do_not_depend_on_the_numbers_beside(name, dtype):
    given = -np.abs(np.random.default_rng(0).standard_normal((4, 2, 19, 3))).astype(dtype)[: ARRAYS.get(name, 3)]

    def computed(arrays):
        return compiled(
            name, arrays, (arrays[0].shape, dtype), dtype, a=1.5, b=-1e4 if name.startswith("log_forget") else 2.0
        )

    whole = computed(given)
    assert np.isfinite(whole).all()
    assert np.array_equal(computed([x[:, ::-1, ::-1] for x in given])[:, ::-1, ::-1], whole)
    assert np.array_equal(computed([x[..., 1:2] for x in given]), whole[..., 1:2])
    for t in range(given[0].shape[1]):
        assert np.array_equal(computed([x[:1, t : t + 1, :1] for x in given]), whole[:1, t : t + 1, :1])
