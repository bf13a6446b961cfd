"""What a compiler's report and machine code say of a kernel."""

from __future__ import annotations

import re
import struct

import numpy as np

HMMA, HGMMA = {0x23C}, {0x9F0, 0xDF0}  # products of a warp; of a warpgroup, A in registers or in shared memory


def spilled(log: str, entry: str = "") -> tuple[int, int]:
    """Bytes of registers stored to local memory, by the entry and by the functions that it calls.

    entry: of a source with several; "": all together.
    """
    report = r"Function properties for (\S+)\s+ptxas\s+\.\s+\d+ bytes stack frame, (\d+) bytes spill stores"
    each = [(name, int(size)) for name, size in re.findall(report, log) if entry in ("", name) or name.startswith("_Z")]
    found = [(name.startswith("_Z"), size) for name, size in each]
    own, called = (sum(size for is_called, size in found if is_called == kind) for kind in (False, True))
    return own, called


def operations(cubin: bytes) -> set[int]:
    """The lowest 12 bits of every instruction of 16 bytes: the operation and the kinds of its operands."""
    start, size, count, names = *struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + n * size) for n in range(count)]
    table = cubin[sections[names][4] :]
    found: set[int] = set()
    for section in sections:
        if table[section[0] :].startswith(b".text."):
            code = np.frombuffer(cubin, dtype="<u8", count=section[5] // 8, offset=section[4])[::2]
            found |= set((code & 0xFFF).tolist())
    return found
