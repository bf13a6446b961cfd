"""Element types of the CUDA sources: codes and sizes; the type of compile-time constants."""

from __future__ import annotations

ELEMENTS = {"bfloat16": 0, "float16": 1, "float32": 2}
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "tf32": 4}

Constants = tuple[tuple[str, int], ...]
