"""One BLAS thread, as the probe's own processes have: small products wait for each other on more."""

import pytest

from linattn_np.lab.workers import one_thread


@pytest.fixture(autouse=True)
def single_thread():
    """Holds for one test."""
    with one_thread():
        yield
