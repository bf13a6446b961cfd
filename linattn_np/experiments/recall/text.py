"""English prose as token ids: paragraphs, tokens, token classes, vocabulary."""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from .needles import ALPHABET, HAYSTACK_SENTENCES, all_keys, question, statement

CLASSES = ("word", "Capital", "digit", "piece", "mark")
WORD_OR_MARK = re.compile(r"[^\W\d]+(?:['’-][^\W\d]+)*|[^\w\s]")
REMOVED_MARKS = str.maketrans("", "", '"*`|')


def python_help_paragraphs() -> list[str]:
    """The paragraphs of CPython's built-in help that are English prose, ordered by topic."""
    from pydoc_data.topics import topics

    folded = (" ".join(block.split()) for name in sorted(topics) for block in topics[name].split("\n\n"))
    return [block.translate(REMOVED_MARKS) for block in folded if reads_as_prose(block)]


def reads_as_prose(block: str) -> bool:
    """True for a block of at least 60 characters that ends a sentence and is at least 86 % letters and spaces."""
    letters = sum(c.isalpha() or c == " " for c in block)
    return len(block) >= 60 and block[-1] in ".:" and letters >= 0.86 * len(block)


def tokens(text: str) -> list[str]:
    """Words and marks; a chunk that contains a digit is split into characters, non-digits as pieces like '#a'."""
    parts: list[str] = []
    for chunk in text.split():
        if any(c.isdigit() for c in chunk):
            parts += [c if c.isdigit() else "#" + c for c in chunk]
        else:
            parts += WORD_OR_MARK.findall(chunk)
    return parts


def token_class(token: str) -> int:
    """The index into CLASSES: the only property of a token that a gate depends on."""
    if token.isdigit():
        return CLASSES.index("digit")
    if token[0] == "#" and len(token) == 2:
        return CLASSES.index("piece")
    if token[0].isupper():
        return CLASSES.index("Capital")
    return CLASSES.index("word" if token[0].isalpha() or token[0] == "_" else "mark")


@dataclass
class Vocabulary:
    """Tokens and their ids, numbered in order of appearance; the answer characters come first."""

    names: list[str] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)

    def encode(self, text: str) -> np.ndarray:
        """Ids (T,) of a text; new tokens are added."""
        return self.encode_tokens(tokens(text))

    def encode_tokens(self, tokens: list[str]) -> np.ndarray:
        """Ids (T,) of tokens; new ones are added."""
        for token in tokens:
            if token not in self.ids:
                self.ids[token] = len(self.names)
                self.names.append(token)
        return np.array([self.ids[token] for token in tokens], np.int32)


@dataclass(frozen=True)
class Corpus:
    """Training prose, held-out prose, and their common vocabulary of N tokens."""

    vocabulary: Vocabulary
    train: np.ndarray  # ids, first half of the prose
    heldout: np.ndarray  # ids, second half of the prose
    haystack: np.ndarray  # ids that a needle is inserted into: the second half, or the user's text
    sentences: np.ndarray  # ids of the short sentences that level 1 repeats
    classes: np.ndarray  # (N,) index into CLASSES
    log_prior: np.ndarray  # (N,) log frequency in `train`, with half a count added


@lru_cache(maxsize=2)
def load_corpus(path: str | None = None) -> Corpus:
    """The prose of CPython's help; the text file at `path`, if given, replaces the second half as the haystack."""
    vocabulary = Vocabulary()
    vocabulary.encode_tokens(list(ALPHABET))
    paragraphs = python_help_paragraphs()
    half = len(paragraphs) // 2
    train = vocabulary.encode(" ".join(paragraphs[:half]))
    heldout = vocabulary.encode(" ".join(paragraphs[half:]))
    sentences = vocabulary.encode(HAYSTACK_SENTENCES)
    for kind in ("number", "uuid"):
        vocabulary.encode(statement(kind, "a") + " " + question(kind, "a"))
    vocabulary.encode_tokens(all_keys())
    haystack = heldout
    if path is not None:
        haystack = vocabulary.encode(Path(path).read_text(encoding="utf8", errors="replace"))
        if not len(haystack):
            raise ValueError(f"{path} holds no words")
    counts = np.bincount(train, minlength=len(vocabulary.names)) + 0.5
    return Corpus(
        vocabulary=vocabulary,
        train=train,
        heldout=heldout,
        haystack=haystack,
        sentences=sentences,
        classes=np.array([token_class(token) for token in vocabulary.names]),
        log_prior=np.log(counts / counts.sum()).astype(np.float32),
    )
