"""Machine code on disk is run only where nobody else can have written it."""

from __future__ import annotations

import os
import stat

import pytest

pytest.importorskip("numba")

from linattn_np.runtime import code_cache
from tests.runtime.test_threads import CALL, run

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners and modes of POSIX")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of the cache."""
    monkeypatch.setenv("LINATTN_CACHE_DIR", str(tmp_path / "cache"))
    path = code_cache.file_of("cpu", "code.o")
    assert code_cache.store(path, b"code")
    return path


def test_folder_and_files_are_private(file):
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert code_cache.load(file) == b"code"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_not_read_and_is_replaced(file, mode):
    file.chmod(mode)
    assert code_cache.load(file) is None
    assert code_cache.store(file, b"new")
    assert code_cache.load(file) == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_file_of_another_user_is_not_read(file, monkeypatch):
    """Neither is the folder of one; root's are, who can write anything."""
    me = os.getuid()
    if me == 0:
        os.chown(file, 12345, -1)
        assert code_cache.load(file) is None
        os.chown(file, 0, -1)
        os.chown(file.parent, 12345, -1)
        assert code_cache.file_of("cpu", "code.o") is None
        os.chown(file.parent, 0, -1)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert code_cache.load(file) == b"code"
    else:
        monkeypatch.setattr(os, "getuid", lambda: me + 1)
        assert code_cache.load(file) is None
        assert code_cache.file_of("cpu", "code.o") is None


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_not_used(file, mode):
    file.parent.chmod(mode)
    assert code_cache.file_of("cpu", "code.o") is None


@pytest.mark.slow
def test_compiled_loops_replace_what_others_can_write(tmp_path):
    """Whole calls: code that anybody could have changed is compiled anew, not run."""
    run(CALL, LINATTN_CACHE_DIR=str(tmp_path))
    files = list(tmp_path.iterdir())
    assert files
    for file in files:
        file.write_bytes(file.read_bytes())
        file.chmod(0o666)
    before = {file: file.stat().st_ino for file in files}
    assert float(run(CALL, LINATTN_CACHE_DIR=str(tmp_path))) > 0
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 and file.stat().st_ino != before[file] for file in files)
