"""Rebinding against values by hand, regression against its theory."""

import numpy as np

from linattn_np.experiments.probe import writing


def test_rebinding_by_hand():
    shares = {row[0]: row[1:] for row in writing.rebinding().tables[0].rows}
    for name, expected in {
        "linear_attention": (1, 1), "delta_rule, beta 1": (0, 1), "delta_rule, beta 0.5": (0.25, 0.5),
        "mesa_net, ridge 1e-9": (0.5, 0.5), "mesa_net, ridge 1e-9, decay 0.8": (0.8 / 1.8, 1 / 1.8),
    }.items():  # fmt: skip
        np.testing.assert_allclose(shares[name], expected, atol=1e-8)


def test_least_squares_meets_its_theory():
    rows = {row[0]: row[1:] for row in writing.least_squares(quick=True).tables[0].rows}
    assert abs(rows["delta_rule, beta 1"][-2] / 32 - 1) < 0.15
    assert abs(rows["mesa_net"][-2] / rows["mesa_net"][-1] - 1) < 0.15
    assert rows["mesa_net"][-2] < rows["delta_rule, beta 0.1"][-2]
