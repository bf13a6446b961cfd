"""Settings of the process: types, limits, and when calls read them."""

from __future__ import annotations

import threading

import pytest

import linattn_np as la
from linattn_np.matrix_state import policy
from linattn_np.runtime.config import Config


def test_defaults():
    assert repr(Config()) == "Config(cuda_saved_mib=1024, training_bits=False)"


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("cuda_saved_mib", -1, ValueError),
        ("cuda_saved_mib", 0.5, TypeError),
        ("cuda_saved_mib", "0", TypeError),
        ("cuda_saved_mib", True, TypeError),
        ("training_bits", 1, TypeError),
        ("training_bits", None, TypeError),
        ("saved_mib", 1, AttributeError),
    ],
)
def test_a_wrong_setting_is_refused_and_changes_nothing(name, value, error):
    config = Config()
    with pytest.raises(error, match=name):
        setattr(config, name, value)
    assert config.values == Config().values


def test_the_limit_of_saved_factors_is_read_by_every_call(monkeypatch):
    for mib in (0, 3):
        monkeypatch.setattr(la.config, "cuda_saved_mib", mib)
        assert policy.saves_factors(mib << 20)
        assert not policy.saves_factors((mib << 20) + 1)


def test_threads_that_change_different_settings_lose_none():
    config, count = Config(), 2000

    def change(name, values):
        for value in values:
            setattr(config, name, value)

    threads = [
        threading.Thread(target=change, args=("cuda_saved_mib", range(count))),
        threading.Thread(target=change, args=("training_bits", [n % 2 == 1 for n in range(count)])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert config.values == (count - 1, True)
