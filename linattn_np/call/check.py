"""check: the findings about the numbers of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .binding import prepare, spec_of
from .findings import Finding, findings


def check(fn: Callable[..., Any], /, *arrays: Any, **options: Any) -> list[Finding]:
    """What is doubtful about the numbers of fn(*arrays, **options): a list of findings, empty if there is none.

    It finds NaN and inf; log decays above 0, also decays given instead of their logarithms and g exchanged with beta;
    write strengths outside [0, 2]; keys so long that beta |k|^2 > 2, and the growth that this means; an erase term
    that makes the state grow; position maps that stretch queries and keys; decay rates and step sizes of the wrong
    sign; a normaliser whose weights are not positive; arrays that seem to have their heads first, or a batch in the
    place of time. It reads all arrays once. The option check=True of every function does the same before it computes:
    a ValueError for errors (is_error),
    a UserWarning for the rest. Of adaptive filters (la.rls and others) it finds NaN and inf, steps that grow, rates
    that learn nothing, and a memory shorter than the inputs are wide. Raises every error of fn about its arguments.
    """
    if (rule := getattr(fn, "check", None)) is not None:
        return rule(arrays, options)
    options.pop("check", None)
    return list(findings(prepare(spec_of("check", fn), arrays, options)))
