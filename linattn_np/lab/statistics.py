"""How sure a share or a paired difference is."""

from dataclasses import dataclass

import numpy as np

Z = 1.96  # normal, 95 % both sides
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 95 %, 1 to 10 degrees of freedom
SHOWS, OPPOSITE, SAME, NOT_SHOWN = "shows", "the opposite shows", "no difference", "not shown"


def wilson(right: float, count: int, z: float = Z) -> tuple[float, float]:
    """Wilson's interval for a share: `right` of `count`."""
    p = right / count
    centre = p + z**2 / (2 * count)
    half = z * np.sqrt(p * (1 - p) / count + z**2 / (4 * count**2))
    scale = 1 + z**2 / count
    return max(0.0, float((centre - half) / scale)), min(1.0, float((centre + half) / scale))


@dataclass(frozen=True)
class Difference:
    """A mean difference, the half-width of its 95 % interval, and the word for it."""

    mean: float
    half_width: float
    word: str


def paired_difference(x: np.ndarray, least: float, alike: float) -> Difference:
    """The mean of paired differences x, (seeds,) or (seeds, streams), and what may be said of it.

    Half-width: the widest of Student's t over seeds, the normal one over streams, and 3 / streams, since the first
    is 0 when all seeds agree. A difference shows when the interval leaves 0 out and the mean is at least `least`;
    there is none when the whole interval lies within `alike` of 0.
    """
    by_seed = x.reshape(len(x), -1).mean(1)
    widths = [0.0]
    if len(by_seed) > 1:
        widths.append(student_t(len(by_seed) - 1) * by_seed.std(ddof=1) / np.sqrt(len(by_seed)))
    if x.ndim == 2:
        widths += [Z * x.std() / np.sqrt(x.size), 3 / x.size]
    mean, half = float(by_seed.mean()), float(max(widths))
    return Difference(mean, half, word_for(mean, half, least, alike))


def student_t(freedom: int) -> float:
    """The 97.5 % point of Student's t."""
    if freedom <= len(STUDENT_T):
        return STUDENT_T[freedom - 1]
    return Z + (Z**3 + Z) / (4 * freedom)  # first term of its expansion in 1 / freedom


def word_for(mean: float, half: float, least: float, alike: float) -> str:
    """One of the four words for a difference that was expected to be positive."""
    if mean - half > 0 and mean >= least:
        return SHOWS
    if mean + half < 0 and mean <= -least:
        return OPPOSITE
    return SAME if abs(mean) + half <= alike else NOT_SHOWN
