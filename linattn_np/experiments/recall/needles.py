"""Needles: a key and a value, the sentence that states them, and the question."""

import random
import uuid
from typing import NamedTuple

HAYSTACK_SENTENCES = "The lamp is warm. The road is long. The tea is sweet. Off we walk. Home and away again."
# fmt: off
FIRST = [
    "tall", "wandering", "quiet", "brave", "gentle", "rapid", "hollow", "bright",
    "ancient", "curious", "humble", "noisy", "rusty", "silent", "vivid", "wicked",
]
SECOND = [
    "age", "river", "lantern", "mountain", "falcon", "garden", "harbor", "island",
    "jungle", "kettle", "ladder", "meadow", "needle", "orchard", "pebble", "quarry",
]
# fmt: on
DIGITS = tuple("0123456789")
ALPHABET = DIGITS + tuple("#" + c for c in "abcdef-")  # characters of an answer, ids 0..16


class Needle(NamedTuple):
    """One fact: `key` has `value`, a 7-digit number or a uuid4."""

    kind: str
    key: str
    value: str


def all_keys() -> list[str]:
    """The 16 x 16 hyphenated pairs, one token each."""
    return [f"{first}-{second}" for first in FIRST for second in SECOND]


def draw_needle(rng: random.Random, kind: str) -> Needle:
    """A random key and value; `kind` is "number" or "uuid"."""
    key = f"{rng.choice(FIRST)}-{rng.choice(SECOND)}"
    if kind == "number":
        return Needle(kind, key, str(rng.randrange(10**6, 10**7)))
    return Needle(kind, key, str(uuid.UUID(int=rng.getrandbits(128), version=4)))


def statement(kind: str, key: str) -> str:
    """The words before the stated value; they end like the question: "for KEY is:"."""
    return f"Keep in mind that the secret {kind} for {key} is:"


def question(kind: str, key: str) -> str:
    """The words before the value in the question."""
    return f"Which is the secret {kind} for {key}? The secret {kind} for {key} is:"
