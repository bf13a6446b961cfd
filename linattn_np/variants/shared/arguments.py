"""Arrays that many variants share."""

from __future__ import annotations

import math

from ...spec import ArgSpec

LOG_DECAY, STRENGTHS, POSITIVE = (-math.inf, 0.0), (0.0, 2.0), (0.0, math.inf)  # limits
GATE, SIGMOID = ("lower_bound",), ("beta_sigmoid",)  # options with which an array is a raw projection

QUERIES = ArgSpec("T Hq K", "queries")
KEYS = ArgSpec("T Hk K", "keys")
UNIT_KEYS = ArgSpec("T Hk K", "keys, of unit length")
VALUES = ArgSpec("T H V", "values")
TOKEN_DECAY = ArgSpec("T H", "log decay of the token, <= 0", limits=LOG_DECAY, raw_with=GATE)
CHANNEL_DECAY = ArgSpec("T H K", "log decay of the key channels, <= 0", limits=LOG_DECAY, raw_with=GATE)
VALUE_DECAY = ArgSpec("T H V", "log decay of the value channels, <= 0", limits=LOG_DECAY)
STRENGTH = ArgSpec("T H", "write strength in [0, 2]", limits=STRENGTHS, raw_with=SIGMOID)
CHANNELS = ArgSpec("T D", "inputs")
DECAY = ArgSpec("T D", "log decay, <= 0", limits=LOG_DECAY)
