"""Arrays that many variants share."""

from __future__ import annotations

from ...spec import ArgSpec

QUERIES = ArgSpec("T Hq K", "queries")
KEYS = ArgSpec("T Hk K", "keys")
UNIT_KEYS = ArgSpec("T Hk K", "keys, of unit length")
VALUES = ArgSpec("T H V", "values")
TOKEN_DECAY = ArgSpec("T H", "log decay of the token, <= 0")
CHANNEL_DECAY = ArgSpec("T H K", "log decay of the key channels, <= 0")
VALUE_DECAY = ArgSpec("T H V", "log decay of the value channels, <= 0")
STRENGTH = ArgSpec("T H", "write strength in [0, 2]")
