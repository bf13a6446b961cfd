"""Machine code on disk is run only where nobody else can have written it."""

from __future__ import annotations

import os
import re
import shutil
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
        with refused(file.parent):
            assert code_cache.file_of("cpu", "code.o") is None
        os.chown(file.parent, 0, -1)
        os.chown(file.parent.parent, 12345, -1)
        with refused(file.parent.parent):
            assert code_cache.file_of("cpu", "code.o") is None
        os.chown(file.parent.parent, 0, -1)
        os.chown(file.parent, 0, -1)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert code_cache.load(file) == b"code"
    else:
        monkeypatch.setattr(os, "getuid", lambda: me + 1)
        assert code_cache.load(file) is None
        with refused(file.parent):
            assert code_cache.file_of("cpu", "code.o") is None


def refused(folder):
    """The warning that names a folder, where nothing is stored."""
    return pytest.warns(UserWarning, match=re.escape(f"others can write to {folder} (chmod go-w"))


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_not_used(file, mode):
    file.parent.chmod(mode)
    with refused(file.parent):
        assert code_cache.file_of("cpu", "code.o") is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_folder_that_others_can_exchange_is_not_used(tmp_path, monkeypatch, mode, depth):
    above = tmp_path / "above"
    where = above.joinpath(*"abc"[:depth])
    where.mkdir(parents=True, mode=0o700)
    above.chmod(mode)
    monkeypatch.setenv("LINATTN_CACHE_DIR", str(where))
    with refused(above):
        assert code_cache.file_of("cpu", "code.o") is None
    above.chmod(0o1777)  # others create what they like there, and exchange nothing of this user
    assert code_cache.file_of("cpu", "code.o") == where / "code.o"


def test_a_folder_behind_a_link_that_others_can_exchange_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link").symlink_to("../own")
    monkeypatch.setenv("LINATTN_CACHE_DIR", str(tmp_path / "open" / "link"))
    assert code_cache.file_of("cpu", "code.o") is not None
    (tmp_path / "open").chmod(0o777)
    with refused(tmp_path / "open"):
        assert code_cache.file_of("cpu", "code.o") is None
    monkeypatch.setenv("LINATTN_CACHE_DIR", str(tmp_path / "first"))
    (tmp_path / "first").symlink_to("open/link")  # a link to that link
    with refused(tmp_path / "open"):
        assert code_cache.file_of("cpu", "code.o") is None


def test_folders_are_private_whatever_the_mask_is(tmp_path, monkeypatch):
    monkeypatch.setenv("LINATTN_CACHE_DIR", str(tmp_path / "a" / "b"))
    mask = os.umask(0)
    try:
        assert code_cache.file_of("cpu", "code.o") is not None
    finally:
        os.umask(mask)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b")] == [0o700, 0o700]


def test_a_file_belongs_to_its_name(file):
    """Copied, renamed or changed files are not run."""
    other = file.with_name("other.o")
    shutil.copy(file, other)
    assert code_cache.load(other) is None
    os.replace(file, other)
    assert code_cache.load(other) is None
    assert code_cache.store(other, b"other code")
    assert code_cache.load(other) == b"other code"
    for content in (b"", other.read_bytes()[:-1], other.read_bytes() + b"x", b"x" + other.read_bytes()[1:]):
        other.write_bytes(content)
        assert code_cache.load(other) is None


@pytest.mark.slow
def test_compiled_loops_with_each_others_names_are_compiled_anew(tmp_path):
    """Machine code of other functions under a function's name: run, it would end the process."""
    right = run(CALL, LINATTN_CACHE_DIR=str(tmp_path))
    files = sorted(tmp_path.glob("*.o"))
    codes = [file.read_bytes() for file in files]
    for file, code in zip(files, codes[1:] + codes[:1], strict=True):
        file.write_bytes(code)
    assert run(CALL, LINATTN_CACHE_DIR=str(tmp_path)) == right
    assert [file.read_bytes() for file in files] == codes


@pytest.mark.slow
def test_compiled_loops_replace_what_others_can_write(tmp_path):
    """Whole calls: code that others could have changed is compiled again, not run."""
    run(CALL, LINATTN_CACHE_DIR=str(tmp_path))
    files = list(tmp_path.iterdir())
    assert files
    for file in files:
        file.write_bytes(file.read_bytes())
        file.chmod(0o666)
    before = {file: file.stat().st_ino for file in files}
    assert float(run(CALL, LINATTN_CACHE_DIR=str(tmp_path))) > 0
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 and file.stat().st_ino != before[file] for file in files)


def test_off_stores_nothing_anywhere(tmp_path, monkeypatch, recwarn):
    """The value of LINATTN_CACHE_DIR is a word here, not a folder: of CPU kernels and of CUDA kernels."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LINATTN_CACHE_DIR", "off")
    for kind in ("cpu", "cubin"):
        assert code_cache.folder(kind) is code_cache.file_of(kind, "code.o") is None
    assert not list(tmp_path.iterdir())
    assert not list(recwarn)
