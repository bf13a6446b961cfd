"""Files of arrays by name, the format of safetensors: 8 bytes (length of the header), JSON, the bytes of the arrays."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

KINDS = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F32": np.float32, "F64": np.float64, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
NAMES = {np.dtype(kind): name for name, kind in KINDS.items()}
ALIGNED = 8  # bytes; the header is padded with blanks
LONGEST = 100_000_000  # bytes of a header


def save(path: str | Path, arrays: Mapping[str, Any], about: Mapping[str, str] | None = None) -> None:
    """Writes arrays by name, and texts `about` them; a file that exists is replaced at once, or not at all.

    Raises TypeError for a dtype that the format does not have and for an `about` that is not of texts.
    """
    each = {n: np.asarray(x) for n, x in arrays.items()}
    for n, x in each.items():
        if x.dtype.newbyteorder("=") not in NAMES:
            raise TypeError(f"save: {n} has dtype {x.dtype}, expected one of {', '.join(map(str, NAMES))}")
    if wrong := [n for n, text in (about or {}).items() if not isinstance(text, str)]:
        raise TypeError(f"save: {wrong[0]} of about is no text")
    header: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    end = 0
    for n, x in sorted(each.items(), key=lambda e: -e[1].itemsize):  # wide ones first: all are aligned
        header[n] = {"dtype": NAMES[x.dtype.newbyteorder("=")], "shape": list(x.shape),
                     "data_offsets": [end, end + x.nbytes]}  # fmt: skip
        end += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    path = Path(path)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(len(text).to_bytes(8, "little") + text)
            for n in header:
                if n != "__metadata__":
                    x = np.ascontiguousarray(each[n]).astype(each[n].dtype.newbyteorder("<"), copy=False)
                    file.write(x.reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o666 & ~_umask())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def load(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(arrays by name, texts about them); the arrays are read-only and in the file until they are read.

    Raises ValueError for a file of another kind or that is cut, OSError for one that cannot be read.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LONGEST, size - 8):
            raise ValueError(f"{path} is no safetensors file: its header does not fit")
        try:
            header = json.loads(file.read(length))
            about = header.pop("__metadata__", {})
            entries = [(n, KINDS[e["dtype"]], tuple(e["shape"]), *e["data_offsets"]) for n, e in header.items()]
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"{path} is no safetensors file: {problem!r}") from problem
    start, arrays = 8 + length, {}
    data = np.memmap(path, np.uint8, "r", start) if size > start else np.empty(0, np.uint8)
    for n, kind, shape, first, last in entries:
        if not 0 <= first <= last <= len(data) or last - first != math.prod(shape) * np.dtype(kind).itemsize:
            raise ValueError(f"{path}: {n} has the bytes {first} to {last}, expected {math.prod(shape)} numbers "
                             f"of {np.dtype(kind)} in {len(data)} bytes")  # fmt: skip
        part = data[first:last]
        part = part if (start + first) % np.dtype(kind).itemsize == 0 else part.copy()
        arrays[n] = part.view(kind).reshape(shape).view(np.ndarray)
    return arrays, about


def _umask() -> int:
    """Permissions that new files do not have."""
    found = os.umask(0)
    os.umask(found)
    return found
