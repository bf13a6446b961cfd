"""Machine code of pieces on disk: damaged files, full disks and many processes at once change no result."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from linattn_np.ops.cpu.rows import scaled
from linattn_np.runtime.pieces import compiler
from linattn_np.runtime.pieces.piece import JIT

pytestmark = pytest.mark.skipif(not JIT, reason="Numba is switched off")

CALL = """
import numpy as np
from linattn_np.matrix_state.types import Plan
from linattn_np.matrix_state.cpu.l2norm import unit_rows
import array_api_compat.numpy as xp
x = np.arange(1.0, 13).reshape(3, 4).astype(np.float32)
y, = unit_rows(Plan(xp, np.float32, 1.0), (x,))
print(bool(np.allclose(y, x / np.linalg.norm(x, axis=-1, keepdims=True))))
"""


def started(folder):
    env = os.environ | {"LINATTN_CACHE_DIR": str(folder)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", CALL], env=env, **pipes)


def ended(process):
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-2000:]
    assert out.strip() == "True"
    return errors


@pytest.fixture
def compiled_here(tmp_path, monkeypatch):
    """() -> the object file of a piece, from this folder or newly compiled, and how often it was compiled."""
    monkeypatch.setenv("LINATTN_CACHE_DIR", str(tmp_path))
    own, calls, real = scaled.piece, [], compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda *given: calls.append(given) or real(*given))

    def again():
        kind = compiler.types.float32
        return compiler.compiled(own.body, own.types_of(kind), "linattn.test"), len(calls)

    return again


@pytest.mark.parametrize("damage", ["truncated", "empty", "one bit", "another file"])
def test_a_damaged_file_is_compiled_anew_and_replaced(damage, compiled_here, tmp_path):
    code, count = compiled_here()
    assert (compiled_here(), count) == ((code, 1), 1)
    (file,) = tmp_path.iterdir()
    stored = file.read_bytes()
    wrong = {"truncated": stored[:-100], "empty": b"", "another file": b"x" * 100,
             "one bit": stored[:200] + bytes([stored[200] ^ 1]) + stored[201:]}[damage]  # fmt: skip
    file.write_bytes(wrong)
    again, count = compiled_here()
    assert count == 2
    assert len(again) == len(code)
    assert file.read_bytes() != wrong
    assert compiled_here()[1] == 2


def test_a_full_disk_is_no_error(compiled_here, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    code, _ = compiled_here()
    assert len(code) > 100
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_changed_after_it_was_loaded_is_not_stored(compiled_here, tmp_path, monkeypatch):
    """The code belongs to the old text; another process would load it under the digest of the new text."""
    compiler._fingerprint.cache_clear()
    monkeypatch.setattr(compiler, "LOADED", 0.0)
    try:
        assert [compiled_here()[1], compiled_here()[1]] == [1, 2]
        assert list(tmp_path.iterdir()) == []
    finally:
        compiler._fingerprint.cache_clear()


def test_the_digest_has_every_file_with_pieces_and_those_beside_it():
    """Code in one folder has the layouts of tables of its own, as serving/log_work.py, and calls pieces of others."""
    package = Path(compiler.__file__).resolve().parents[2]
    with_pieces = [path for path in package.rglob("*.py") if "pieces.piece import" in path.read_text()]
    assert len(with_pieces) > 40
    for path in with_pieces:
        found = set(compiler.sources_of(str(path)))
        assert found >= {path, *path.parent.glob("*.py"), *(package / "ops" / "cpu").glob("*.py")}, path


def test_many_processes_at_once(tmp_path):
    for process in [started(tmp_path) for _ in range(3)]:
        ended(process)
    assert not [f for f in tmp_path.iterdir() if f.suffix == ".partial"]
    ended(started(tmp_path))


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root writes everywhere")
def test_a_folder_without_permission_is_no_error(tmp_path):
    tmp_path.chmod(0o500)
    ended(started(tmp_path / "cache"))
