"""Feature maps."""

from linattn_np.experiments.probe import kernels


def test_more_features_come_nearer():
    result = kernels.kernels(quick=True)
    small = {row[0]: row[1:] for row in result.tables[0].rows}
    assert small["Taylor"][-1] < 0.05 * small["Taylor"][0]
    assert small["FAVOR+"][-1] < 0.5 * small["FAVOR+"][0]
