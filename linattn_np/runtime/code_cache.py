"""Machine code on disk: whole files only, nothing deserialised, and only files that no other user can have written.

A file begins with a digest of its own name and of its code: a copy under another name, whose code is that of another
key, is recompiled and replaced, as are damaged files. Folder and file belong to this user, or to root, and are not
writable by group or others; nor can others exchange the folder: those above it belong to this user or root too, and
where group or others can write in them, they have the sticky bit. Otherwise a warning names the folder, and nothing is
read or stored. Windows permissions are not checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from .callers import caller

SEAL = 32  # bytes of the digest
OTHERS = stat.S_IWGRP | stat.S_IWOTH


def folder(kind: str) -> Path | None:
    """The folder of a kind of code: $LINATTN_CACHE_DIR, else linattn_np/<kind> in the user's cache folder.

    None if the variable is "off": nothing is read or stored.
    """
    chosen = os.environ.get("LINATTN_CACHE_DIR")
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "linattn_np" / kind


def folder_in_words(kind: str) -> str:
    """The folder of a kind of code, or why there is none."""
    return str(folder(kind) or "nowhere: LINATTN_CACHE_DIR is off")


def file_of(kind: str, name: str) -> Path | None:
    """The path of a name; None without a folder, or, with a UserWarning, if others can write to it."""
    where = folder(kind)
    if where is None:
        return None
    try:
        _create(where)
        open_to_others = _open_to_others(where)
    except OSError:
        return None
    if open_to_others is None:
        return where / name
    warnings.warn(
        f"linattn_np: machine code is not stored in {where}: others can write to {open_to_others} "
        "(chmod go-w, or choose a folder of your own by LINATTN_CACHE_DIR)",
        stacklevel=caller()[1],
    )
    return None


def _create(where: Path) -> None:
    """The folder and those above it that do not exist, private each."""
    for path in (*reversed(where.parents), where):
        with contextlib.suppress(FileExistsError):
            if not path.is_dir():
                path.mkdir(mode=0o700)


def _open_to_others(where: Path) -> Path | None:
    """The folder in which others can change what `where` contains, or which folder it is; None if there is none."""
    if not hasattr(os, "getuid"):
        return None
    real = Path(os.path.realpath(where))
    if not _is_safe(real.stat()):
        return real
    above = (path for path in _way(where) if path != real and not _is_safe(path.lstat(), above=True))
    return next(above, None)


def _way(path: Path) -> Iterator[Path]:
    """Every folder and link that a path goes through."""
    path = Path(os.path.abspath(path))
    for part in (*reversed(path.parents), path):
        yield part
        if part.is_symlink():
            yield from _way(part.parent / os.readlink(part))


def _is_safe(status: os.stat_result, above: bool = False) -> bool:
    """Whether only this user and root can have written here; above: whether only they can replace their files.

    The owner of the root folder is root, also where a container gives it another number.
    """
    if not hasattr(os, "getuid"):
        return True
    if status.st_uid not in (0, os.getuid(), os.stat("/").st_uid):
        return False
    if above and (stat.S_ISLNK(status.st_mode) or status.st_mode & stat.S_ISVTX):
        return True
    return not status.st_mode & OTHERS


def load(path: Path) -> bytes | None:
    """The code in a file; None if there is none, others can have written it, or it was stored under another name."""
    try:
        with open(path, "rb") as file:
            content = file.read() if _is_safe(os.fstat(file.fileno())) else b""
    except OSError:
        return None
    code = content[SEAL:]
    return code if content[:SEAL] == _seal(path, code) else None


def _seal(path: Path, code: bytes) -> bytes:
    name = path.name.encode()
    return hashlib.sha256(len(name).to_bytes(8, "little") + name + code).digest()


def store(path: Path, code: bytes) -> bool:
    """Write to a temporary file, then rename: readers find the whole file or none. False on failure."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")  # readable by its owner only
        with os.fdopen(handle, "wb") as file:
            file.write(_seal(path, code) + code)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True
