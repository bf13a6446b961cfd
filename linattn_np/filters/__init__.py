"""Adaptive filters: weights W_t (K, V) that predict d_t (V) from x_t (K), and then learn from the error.

    y_t = x_t W_{t-1}        e_t = d_t - y_t

    lms    W_t = W_{t-1} + mu_t x_t^T e_t
    nlms   W_t = W_{t-1} + mu_t x_t^T e_t / (eps + |x_t|^2)
    rls    W_t = argmin_W sum_{j <= t} lambda^{t-j} |d_j - x_j W|^2 + delta lambda^t |W|^2

    affine_projection      W_t = W_{t-1} + mu_t X^T (X X^T + eps I)^{-1} (D - X W_{t-1})
    window_least_squares   W_t = argmin_W sum_{t - c < j <= t} w_tj |d_j - x_j W|^2 + delta |W|^2

The first two are delta rules (gradient.py), the third is mesa_net's memory (least_squares.py), with keys x and
values d. affine_projection is kda on micro-steps (projection.py); windows are systems in array calls
(local_fits.py).
"""

from __future__ import annotations

import functools
from typing import Any

from ..runtime.arrays import device, enter
from ..runtime.shapes import check_dtype
from ..runtime.values import is_whole, shown
from . import gradient, projection
from . import least_squares as fit
from .arguments import Filter, Filtered, PastState, ProjectionState, RLSState
from .findings import check
from .gradient import gradient_filter
from .least_squares import least_squares
from .local_fits import window_filter
from .projection import projection_filter

LMS = Filter("lms", "mu", None, {}, gradient.core_call, gradient_filter)
NLMS = Filter("nlms", "mu", 1.0, {"eps": 0.0}, gradient.core_call, gradient_filter)
RLS = Filter("rls", "forgetting", 1.0, {"delta": 1.0}, fit.core_call, least_squares,
             ("solver", "iterations", "tolerance"), RLSState,
             {"state.S": "K V", "state.Z": "K K", "state.ridge": ""}, forgets=True)  # fmt: skip
PROJECTION = Filter("affine_projection", "mu", 1.0, {"order": 4, "eps": 0.0}, projection.core_call,
                    projection_filter, (), ProjectionState,
                    {"state.W": "K V", "state.x": "N K", "state.d": "N V"},
                    past=lambda numbers: numbers["order"] - 1)  # fmt: skip
WINDOW = Filter("window_least_squares", "forgetting", 1.0, {"window": 64, "delta": 1e-3, "bandwidth": None}, None,
                window_filter, (), PastState, {"state.x": "N K", "state.d": "N V", "state.rate": "N"}, forgets=True,
                past=lambda numbers: numbers["window"], queries=True)  # fmt: skip


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


def affine_projection(
    x: Any, d: Any, mu: Any = 1.0, *, order: int = 4, eps: float = 0.0, state: Any = None, **options: Any
) -> Filtered:
    """Affine projection: a step onto the weights that fit the last `order` tokens.

        y_t = x_t W_{t-1},   W_t = W_{t-1} + mu_t X^T (X X^T + r I)^{-1} (D - X W_{t-1})

    The rows of X and D are those of the tokens t - order + 1 to t.


    x      (..., T, K)          inputs
    d      (..., T, V)          desired outputs
    mu     number or (..., T)   step size; stable for 0 < mu < 2
    order  whole number         tokens of a step; 1 is nlms
    eps    number >= 0          r = max(eps, order epsilon trace(X X^T)): not below the rounding error of X X^T
    state  ProjectionState      of an earlier call

    With mu=1 the new weights fit all of them, up to r; the nearest ones to W_{t-1} that do. Rows before the first token
    are zeros. Options: chunk_size, backend, num_threads, precision. Results as in lms; state is a ProjectionState.
    Ozeki, Umeda, An adaptive filtering algorithm using an orthogonal projection to an affine subspace, 1984.
    """
    return PROJECTION((x, d, mu), {"order": order, "eps": eps, "state": state, **options})


def window_least_squares(
    x: Any, d: Any, forgetting: Any = 1.0, *, q: Any = None, window: int = 64, delta: float = 1e-3,
    bandwidth: float | None = None, state: Any = None,
) -> Filtered:  # fmt: skip
    """Sliding-window least squares: the weights are the fit of the last tokens, or of those that are near.

        W_t = argmin_W sum_{t - window < j <= t} w_tj |d_j - x_j W|^2 + delta |W|^2,   y_t = x_t W_{t-1}
        w_tj = lambda_{j+1} .. lambda_t, and with bandwidth h times e^{-|x_{t+1} - x_j|^2 / (2 h^2)}
        with queries  y_t = q_t W_t,   w_tj around q_t instead of x_{t+1}

    x           (..., T, K)          inputs; a column of ones makes the fit affine
    d           (..., T, V)          desired outputs
    forgetting  number or (..., T)   lambda, in (0, 1]
    q           (..., T, K)          queries of an attention with keys x and values d: q_t reads token t too
    window      whole number         tokens of a fit
    delta       number > 0           ridge, not below K epsilon trace(X^T w X), the rounding error
    bandwidth   number > 0           of a kernel around the input that is predicted; None: all weigh the same
    state       PastState            the last tokens of an earlier call

    Each window is summed anew: nothing is subtracted, so that what has left a window leaves no rounding error. Its cost
    is window K^2 + K^3 a token. With a bandwidth this is locally weighted regression, and the weights that are returned
    are those around the last input. Results as in lms; state is a PastState.
    Cleveland, Devlin, Locally weighted regression, 1988; Wang, Shi, Fox, Test-time regression, arXiv 2501.12352.
    """
    numbers = {"window": window, "delta": delta, "bandwidth": bandwidth}
    return WINDOW((x, d, forgetting), {"q": q, "state": state, **numbers})


for _fn, _filter in ((lms, LMS), (nlms, NLMS), (rls, RLS), (affine_projection, PROJECTION),
                     (window_least_squares, WINDOW)):  # fmt: skip
    # the rules of la.vjp, la.step, la.explain, la.check
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
    for name, y in (("u", u), ("before", u if past is None else past)):
        check_dtype("delay_line", name, y)
    if not u.ndim:
        raise ValueError("delay_line: u has shape (), expected (..., T)")
    lead = (*u.shape[:-1], int(taps) - 1)
    if past is None:
        past = xp.zeros(lead, dtype=u.dtype, device=device(u))
    elif tuple(past.shape) != lead:
        raise ValueError(f"delay_line: before has shape {tuple(past.shape)}, expected {lead}")
    line, T = xp.concat([past, u], axis=-1), u.shape[-1]
    return library.give_back(xp.stack([line[..., n : n + T] for n in reversed(range(int(taps)))], axis=-1))
