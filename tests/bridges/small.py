"""Small calls that the tests of several frameworks draw."""

from __future__ import annotations

from tests.cases import PLAIN, one_per, with_arrays

SIZES = {"T": 5, "B": (2,), "H": 2, "K": 4, "V": 3}
RULE = with_arrays("q k v g beta")
FEW = one_per(lambda spec: (spec.decay, spec.erase, spec.readout, spec.micro_steps, spec.state.parts), PLAIN)
