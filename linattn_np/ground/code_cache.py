"""Machine code on disk: whole files only, nothing deserialised, and only what nobody else can have written.

Folder and file belong to this user, or to root, and are not writable by group or others; what is not so is compiled
anew and replaced. Windows has other rights, which are not looked at.
"""

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
    """The file of a name; None where the folder cannot be made or others can write to it."""
    where = folder(kind)
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = where.stat()
    except OSError:
        return None
    return where / name if _is_safe(about) else None


def _is_safe(about: os.stat_result) -> bool:
    """Whether nobody but this user and root can have written here."""
    if not hasattr(os, "getuid"):
        return True
    return about.st_uid in (0, os.getuid()) and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def load(path: Path) -> bytes | None:
    """What a file holds; None if there is none, or if others can have written it."""
    try:
        with open(path, "rb") as file:
            return file.read() if _is_safe(os.fstat(file.fileno())) else None
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
