"""Confidence intervals of means and of paired differences."""

from dataclasses import dataclass

import numpy as np

Z = 1.96  # normal quantile, 95 % two-sided
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 95 %, 1 to 10 degrees of freedom
SUPPORTED, CONTRADICTED, SAME, INCONCLUSIVE = "supported", "contradicted", "no difference", "inconclusive"


@dataclass(frozen=True)
class Difference:
    """A mean difference, the half-width of its 95 % interval, and the conclusion as a word."""

    mean: float
    half_width: float
    word: str


def paired_difference(x: np.ndarray, least: float, equivalent: float) -> Difference:
    """The mean of paired differences x, (seeds,) or (seeds, streams), and the conclusion.

    Half-width: the largest of Student's t over seeds, the normal interval over streams, and 3 / streams, because the
    first is 0 when all seeds agree; infinite for one number. A positive difference is supported if the interval
    excludes 0 and the mean is at least `least`; there is no difference if the interval lies within +-`equivalent`.
    """
    by_seed = x.reshape(len(x), -1).mean(1)
    widths = [0.0]
    if len(by_seed) > 1:
        widths.append(student_t(len(by_seed) - 1) * by_seed.std(ddof=1) / np.sqrt(len(by_seed)))
    elif x.ndim == 1:
        widths.append(np.inf)  # one number says nothing of its own spread
    if x.ndim == 2:
        widths += [Z * x.std() / np.sqrt(x.size), 3 / x.size]
    mean, half = float(by_seed.mean()), float(max(widths))
    return Difference(mean, half, word_for(mean, half, least, equivalent))


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t."""
    if freedom <= len(STUDENT_T):
        return STUDENT_T[freedom - 1]
    return Z + (Z**3 + Z) / (4 * freedom)  # first term of its expansion in 1 / freedom


def word_for(mean: float, half: float, least: float, equivalent: float) -> str:
    """One of the four conclusions on a difference that is expected to be positive."""
    if mean - half > 0 and mean >= least:
        return SUPPORTED
    if mean + half < 0 and mean <= -least:
        return CONTRADICTED
    return SAME if abs(mean) + half <= equivalent else INCONCLUSIVE
