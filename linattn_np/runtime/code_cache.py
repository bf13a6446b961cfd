"""Machine code on disk: whole files only, nothing deserialised, and only files that no other user can have written.

Folder and file belong to this user, or to root, and are not writable by group or others; otherwise the code is compiled
again and replaced. Windows permissions are not checked.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def folder(kind: str) -> Path:
    """The folder of a kind of code: $LINATTN_CACHE_DIR, else linattn_np/<kind> in the user's cache folder."""
    chosen = os.environ.get("LINATTN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "linattn_np" / kind


def file_of(kind: str, name: str) -> Path | None:
    """The path of a name; None if the folder cannot be created or others can write to it."""
    where = folder(kind)
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = where.stat()
    except OSError:
        return None
    return where / name if _is_safe(status) else None


def _is_safe(status: os.stat_result) -> bool:
    """Whether only this user and root can have written here."""
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid in (0, os.getuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def load(path: Path) -> bytes | None:
    """The content of a file; None if it does not exist or others can have written it."""
    try:
        with open(path, "rb") as file:
            return file.read() if _is_safe(os.fstat(file.fileno())) else None
    except OSError:
        return None


def store(path: Path, code: bytes) -> bool:
    """Write to a temporary file, then rename: readers find the whole file or none. False on failure."""
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
