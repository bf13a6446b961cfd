"""Machine code on disk: in a folder that is this user's alone to write to, whole files only, nothing deserialised."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def folder(kind: str) -> Path:
    """Where code of a kind is kept: $LINATTN_CACHE_DIR, else linattn_np/<kind> in the user's cache folder."""
    own = os.environ.get("LINATTN_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "linattn_np" / kind


def file_of(kind: str, name: str) -> Path | None:
    """The file of a name; None where the folder cannot be made or is not this user's alone to write."""
    where = folder(kind)
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = where.stat()
    except OSError:
        return None
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        return None
    return where / name


def load(path: Path) -> bytes | None:
    """What a file holds; None if there is none."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def store(path: Path, code: bytes) -> bool:
    """Write under another name, then rename: readers find the whole file or none. False where that fails."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")  # readable by its owner only
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True
