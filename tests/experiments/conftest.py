"""One BLAS thread, as in the worker processes of the experiments."""

import pytest

from linattn_np.experiments.workers import one_thread


@pytest.fixture(autouse=True)
def single_thread():
    """Limit BLAS during one test."""
    with one_thread():
        yield
