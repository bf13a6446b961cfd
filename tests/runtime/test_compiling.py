"""A first call that compiles says so once, after a second; code from the disk says nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from linattn_np.runtime import code_cache, compiling
from linattn_np.runtime.cuda import compile as cuda_compile
from linattn_np.runtime.cuda import nvrtc


@pytest.fixture
def time(monkeypatch):
    """The clock, which stands until time[0] is moved."""
    now = [1000.0]
    monkeypatch.setattr(compiling, "clock", lambda: now[0])
    monkeypatch.setattr(compiling, "_call", {"began": -1.0, "ended": -1.0, "said": 0.0})
    return now


def compiled(time, what, seconds, path=Path("/kept/code.o")):
    with compiling.compiling(what, path):
        time[0] += seconds


def test_only_after_a_second_and_once_a_call(time, caplog):
    caplog.set_level(logging.WARNING, "linattn_np")
    for name in "abc":
        compiled(time, name, 0.3)
    assert not caplog.records
    for name in "defg":
        compiled(time, name, 0.3)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("linattn_np", "WARNING")
    assert (
        record.getMessage() == "a first call compiles (d and others); the code is stored in /kept for later processes"
    )


def test_another_call_says_it_again(time, caplog):
    caplog.set_level(logging.WARNING, "linattn_np")
    compiled(time, "one", 1.5)
    time[0] += 60
    compiled(time, "few", 0.5)
    time[0] += 60
    compiled(time, "two", 1.5, None)
    assert [r.getMessage().split(" and")[0] for r in caplog.records] == [
        "a first call compiles (one",
        "a first call compiles (two",
    ]
    assert caplog.records[1].getMessage().endswith("not stored: the next process compiles again")


def test_nvrtc_says_it_but_not_for_code_from_the_disk(time, caplog, tmp_path, monkeypatch):
    caplog.set_level(logging.WARNING, "linattn_np")
    monkeypatch.setenv("LINATTN_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 9))

    def program(*given):
        time[0] += 2
        return b"cubin", ""

    monkeypatch.setattr(nvrtc, "compile_program", program)
    source = ("token/step.cu", "text", {})
    first, again = (cuda_compile.compile_source(source, {}, "sm_90a") for _ in range(2))
    assert first[0] == again[0] == b"cubin"
    (record,) = caplog.records
    assert "token/step.cu by NVRTC" in record.getMessage()
    assert str(tmp_path) in record.getMessage()
    assert code_cache.load(first[2]) == b"cubin"


def test_numba_says_it_but_not_for_code_from_the_disk(time, caplog, tmp_path, monkeypatch):
    pytest.importorskip("numba")
    from linattn_np.runtime.pieces import compiler

    caplog.set_level(logging.WARNING, "linattn_np")
    monkeypatch.setenv("LINATTN_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)

    def slow(*given):
        time[0] += 2
        return b"object"

    monkeypatch.setattr(compiler, "_compile", slow)
    monkeypatch.setattr(compiler, "_fingerprint", lambda source: "0")
    found = [compiler.compiled(compiled, None, "scan_float32") for _ in range(2)]
    assert found == [b"object", b"object"]
    (record,) = caplog.records
    assert "scan_float32 by Numba" in record.getMessage()
