"""Adaptive filters: weights W_t (K, V) that predict d_t (V) from x_t (K), and then learn from the error.

    y_t = x_t W_{t-1}        e_t = d_t - y_t

    lms    W_t = W_{t-1} + mu_t x_t^T e_t
    nlms   W_t = W_{t-1} + mu_t x_t^T e_t / (eps + |x_t|^2)
    rls    W_t = argmin_W sum_{j <= t} lambda^{t-j} |d_j - x_j W|^2 + delta lambda^t |W|^2

The first two are delta rules (gradient.py), the third is mesa_net's memory (least_squares.py), with keys x and
values d.
"""

from __future__ import annotations

import functools
from typing import Any

from ..runtime.arrays import device, enter
from ..runtime.values import is_whole, shown
from . import gradient
from . import least_squares as fit
from .arguments import Filter, Filtered
from .findings import check
from .gradient import gradient_filter
from .least_squares import least_squares

LMS = Filter("lms", "mu", None, {}, gradient.core_call, gradient_filter)
NLMS = Filter("nlms", "mu", 1.0, {"eps": 0.0}, gradient.core_call, gradient_filter)
RLS = Filter("rls", "forgetting", 1.0, {"delta": 1.0}, fit.core_call, least_squares,
             ("solver", "iterations", "tolerance"))  # fmt: skip


def lms(x: Any, d: Any, mu: Any, *, state: Any = None, **options: Any) -> Filtered:
    """Least mean squares: one gradient step on the squared error of each token.

        y_t = x_t W_{t-1},   W_t = W_{t-1} + mu_t x_t^T (d_t - y_t)

    x      (..., T, K)          inputs; la.delay_line makes them from a signal
    d      (..., T, V)          desired outputs
    mu     number or (..., T)   step size; stable for 0 < mu |x|^2 < 2
    state  (..., K, V)          W_0; zeros by default

    Options: chunk_size, backend, num_threads, precision, as in every function.
    Returns Filtered(prediction (..., T, V), error (..., T, V), weights (..., K, V), state, the weights).
    la.vjp(la.lms, x, d, mu) gives (Filtered, pullback), with pullback(dprediction, derror, dweights, dstate), each of
    them optional. la.step takes one token, x (..., K) and d (..., V); la.check and la.explain take filters too.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Widrow, Hoff, Adaptive switching circuits, 1960.
    """
    return LMS((x, d, mu), {"state": state, **options})


def nlms(x: Any, d: Any, mu: Any = 1.0, *, eps: float = 0.0, state: Any = None, **options: Any) -> Filtered:
    """Normalised least mean squares: steps that do not depend on the scale of the inputs.

        y_t = x_t W_{t-1},   W_t = W_{t-1} + mu_t x_t^T (d_t - y_t) / (eps + |x_t|^2)

    x, d, mu, state, options and results as in lms; stable for 0 < mu < 2. With mu=1 and eps=0 the new weights fit the
    token exactly; mu=1 and eps=1/beta is longhorn's step. Where |x_t| is 0, or below the smallest normal
    number, nothing is learned.
    Haykin, Adaptive Filter Theory, 5th edition, chapter 7.
    """
    return NLMS((x, d, mu), {"eps": eps, "state": state, **options})


def rls(x: Any, d: Any, forgetting: Any = 1.0, *, delta: float = 1.0, state: Any = None, **options: Any) -> Filtered:
    """Recursive least squares: the weights are the least-squares fit of all tokens so far, old ones forgotten.

        Z_t = lambda_t Z_{t-1} + x_t^T x_t,   S_t = lambda_t S_{t-1} + x_t^T d_t,   r_t = lambda_t r_{t-1}, r_0 = delta
        (Z_t + r_t I) W_t = S_t,   y_t = x_t W_{t-1}

    x           (..., T, K)          inputs
    d           (..., T, V)          desired outputs
    forgetting  number or (..., T)   lambda, in (0, 1]
    delta       number > 0           the textbook's P_0 is I / delta
    state       RLSState             of an earlier call, instead of delta

    Every system is solved by itself; the textbook updates the inverse P_t, whose rounding errors grow like lambda^{-t}
    in directions that x has left. r_t is at least K eps trace(Z_t), the rounding error of Z_t.
    Options also: solver, iterations, tolerance, as in mesa_net. Results as in lms; state is an RLSState.
    Haykin, Adaptive Filter Theory, 5th edition, chapter 10.
    """
    return RLS((x, d, forgetting), {"delta": delta, "state": state, **options})


for _fn, _filter in ((lms, LMS), (nlms, NLMS), (rls, RLS)):  # the rules of la.vjp, la.step, la.explain, la.check
    for _name in ("vjp", "step", "step_vjp", "explain"):
        setattr(_fn, _name, getattr(_filter, _name))
    setattr(_fn, "check", functools.partial(check, _filter))  # noqa: B010


def delay_line(u: Any, taps: int, *, before: Any = None) -> Any:
    """The last `taps` values of a signal at every time, newest first: u (..., T) to (..., T, taps).

    before (..., taps - 1): the values before the first one, oldest first; zeros by default.
    """
    if not is_whole(taps):
        raise ValueError(f"delay_line: taps is {shown(taps)}, expected a whole number from 1")
    library, entered = enter("delay_line", {"u": u, "before": before})
    xp, u, past = library.xp, entered["u"], entered["before"]
    lead = (*u.shape[:-1], int(taps) - 1)
    if past is None:
        past = xp.zeros(lead, dtype=u.dtype, device=device(u))
    elif tuple(past.shape) != lead:
        raise ValueError(f"delay_line: before has shape {tuple(past.shape)}, expected {lead}")
    line, T = xp.concat([past, u], axis=-1), u.shape[-1]
    return library.give_back(xp.stack([line[..., n : n + T] for n in reversed(range(int(taps)))], axis=-1))
