"""Formulas of numbers, each with its derivative below it: out = f(x, y, z, u; a, b), `how` choosing between forms."""

from __future__ import annotations

import numpy as np

from ...runtime.pieces.piece import Number, Vector, Whole, piece
from ...runtime.pieces.registers import times
from .numbers import exp, expm1, log, log1p, number, sigmoid, softplus, tanh


@piece(of="copy")
def copy(x: Vector, out: Vector):
    """x, NaN with their bits"""
    for j in range(len(out)):
        out[j] = x[j]


@piece(of="scaled")
def scaled(x: Vector, a: Number, out: Vector):
    """a x"""
    for j in range(len(out)):
        out[j] = a * x[j]


@piece(of="product")
def product(x: Vector, y: Vector, z: Vector, out: Vector):
    """x y z; no z: x y"""
    for j in range(len(out)):
        out[j] = x[j] * y[j]
    for j in range(len(z)):
        out[j] *= z[j]


@piece(of="added")
def added(x: Vector, y: Vector, out: Vector):
    """x + y"""
    for j in range(len(out)):
        out[j] = x[j] + y[j]


# keys and gates that are the forgotten share of a channel


@piece(of="complement")
def complement(x: Vector, y: Vector, out: Vector):
    """(1 - e^x) y; no y: 1 - e^x"""
    for j in range(len(out)):
        out[j] = -expm1(x[j])
    for j in range(len(y)):
        out[j] *= y[j]


@piece(of="complement_vjp")
def complement_vjp(x: Vector, y: Vector, z: Vector, out: Vector):
    """y - e^x z"""
    for j in range(len(out)):
        out[j] = y[j] - exp(x[j]) * z[j]


@piece(of="log_rest")
def log_rest(x: Vector, out: Vector):
    """log(1 - x); -inf from x = 1 on"""
    one = number(out, 1)
    for j in range(len(out)):
        out[j] = log1p(-one if x[j] >= one else -x[j])


@piece(of="log_rest_vjp")
def log_rest_vjp(x: Vector, y: Vector, z: Vector, out: Vector):
    """y - z / (1 - x); y from x = 1 on"""
    one = number(out, 1)
    for j in range(len(out)):
        out[j] = y[j] - z[j] / (one - x[j]) if x[j] < one else y[j]


# Mamba-2: step sizes, skip connection and output gate


@piece(of="step_size")
def step_size(x: Vector, y: Vector, soft: Whole, low: Number, high: Number, out: Vector):
    """x + y, or softplus(x + y), within its limits; no y: 0"""
    for j in range(len(out)):
        raw = x[j] + y[j] if len(y) else x[j]
        step = softplus(raw) if soft else raw
        step = low if step < low else step
        out[j] = high if step > high else step


@piece(of="step_size_vjp")
def step_size_vjp(x: Vector, y: Vector, z: Vector, soft: Whole, low: Number, high: Number, out: Vector):
    """z times the slope of step_size, which is 0 outside its limits"""
    for j in range(len(out)):
        raw = x[j] + y[j] if len(y) else x[j]
        step, slope = softplus(raw) if soft else raw, sigmoid(raw) if soft else number(out, 1)
        out[j] = z[j] * slope if low <= step <= high else number(out, 0)


@piece(of="skip_and_gate")
def skip_and_gate(x: Vector, y: Vector, z: Vector, u: Vector, out: Vector):
    """(x + y z) silu(u); no y: x silu(u), no u: x + y z"""
    for j in range(len(out)):
        out[j] = x[j] + y[j] * z[j] if len(y) else x[j]
    for j in range(len(u)):
        out[j] *= u[j] * sigmoid(u[j])


@piece(of="gate_vjp")
def gate_vjp(x: Vector, y: Vector, z: Vector, out: Vector):
    """x y silu'(z): the gradient of z of x silu(z), whose gradient is y"""
    one = number(out, 1)
    for j in range(len(out)):
        s = sigmoid(z[j])
        out[j] = x[j] * y[j] * s * (one + z[j] * (one - s))


# mLSTM's gates before their stabiliser


@piece(of="capped")
def capped(x: Vector, cap: Number, out: Vector):
    """cap tanh(x / cap); cap = 0: x"""
    for j in range(len(out)):
        out[j] = cap * tanh(x[j] / cap) if cap > 0 else x[j]


@piece(of="log_forget")
def log_forget(x: Vector, cap: Number, floor: Number, is_log: Whole, out: Vector):
    """log sigmoid(y), or y, of y = capped(x); at least `floor`"""
    for j in range(len(out)):
        y = cap * tanh(x[j] / cap) if cap > 0 else x[j]
        y = y if is_log else -softplus(-y)
        out[j] = floor if y < floor else y


@piece(of="capped_vjp")
def capped_vjp(x: Vector, y: Vector, cap: Number, out: Vector):
    """y times the slope of capped, 1 - tanh(x / cap)^2; cap = 0: y"""
    for j in range(len(out)):
        t = tanh(x[j] / cap) if cap > 0 else number(out, 0)
        out[j] = y[j] * (number(out, 1) - times(t, t))


@piece(of="log_forget_vjp")
def log_forget_vjp(x: Vector, y: Vector, cap: Number, floor: Number, is_log: Whole, out: Vector):
    """y times the slope of log_forget, 0 below `floor`"""
    one, none = number(out, 1), number(out, 0)
    for j in range(len(out)):
        t = tanh(x[j] / cap) if cap > 0 else none
        raw = cap * t if cap > 0 else x[j]
        value, slope = (raw, one) if is_log else (-softplus(-raw), sigmoid(-raw))
        out[j] = y[j] * slope * (one - times(t, t)) if value > floor else none


# gates from their raw projections (ops/gate_formula.py)


@piece(of="log_decay")
def log_decay(x: Vector, y: Vector, z: Vector, out: Vector):
    """-e^z softplus(x + y); no y: 0"""
    for j in range(len(out)):
        out[j] = -exp(z[j]) * softplus(x[j] + y[j] if len(y) else x[j])


@piece(of="bounded")
def bounded(x: Vector, y: Vector, z: Vector, bound: Number, out: Vector):
    """bound sigmoid(e^z (x + y)); no y, no z: 0"""
    for j in range(len(out)):
        raw = x[j] + y[j] if len(y) else x[j]
        out[j] = bound * sigmoid(exp(z[j]) * raw if len(z) else raw)


LOG_SIGMOID, LOWER_BOUND, EXPONENTIAL = range(3)


@piece(of="decay")
def decay(x: Vector, y: Vector, z: Vector, kind: Whole, a: Number, out: Vector):
    """Of b = x + y: log sigmoid(b) / a; log(a + (1 - a) sigmoid(b)); -e^z e^b.  No y, no z: 0"""
    one = number(out, 1)
    if kind == LOG_SIGMOID:
        for j in range(len(out)):
            out[j] = -softplus(-(x[j] + y[j] if len(y) else x[j])) / a
    elif kind == LOWER_BOUND:
        for j in range(len(out)):
            out[j] = log(a + (one - a) * sigmoid(x[j] + y[j] if len(y) else x[j]))
    else:
        for j in range(len(out)):
            g = -exp(x[j] + y[j] if len(y) else x[j])
            out[j] = exp(z[j]) * g if len(z) else g


@piece(of="decay_vjp")
def decay_vjp(x: Vector, y: Vector, z: Vector, u: Vector, kind: Whole, a: Number, out: Vector):
    """u times the derivative of `decay` by x; that of e^z e^b by z is the same"""
    one = number(out, 1)
    if kind == LOG_SIGMOID:
        for j in range(len(out)):
            out[j] = u[j] * sigmoid(-(x[j] + y[j] if len(y) else x[j])) / a
    elif kind == LOWER_BOUND:
        for j in range(len(out)):
            s = sigmoid(x[j] + y[j] if len(y) else x[j])
            out[j] = u[j] * ((one - a) * s * (one - s) / (a + (one - a) * s))
    else:
        for j in range(len(out)):
            g = -exp(x[j] + y[j] if len(y) else x[j])
            out[j] = u[j] * (exp(z[j]) * g if len(z) else g)


# feature maps


ELU_PLUS_ONE, RELU, EXP, SILU, ROOT = range(5)


@piece(of="feature")
def feature(x: Vector, kind: Whole, out: Vector):
    """x + 1 where x > 0 and e^x elsewhere; max(x, 0); e^x; x sigmoid(x); sqrt(max(x, 0))"""
    one, none = number(out, 1), number(out, 0)
    if kind == ELU_PLUS_ONE:
        for j in range(len(out)):
            out[j] = x[j] + one if x[j] > 0 else exp(x[j])
    elif kind == RELU:
        for j in range(len(out)):
            out[j] = x[j] if x[j] > 0 else none
    elif kind == EXP:
        for j in range(len(out)):
            out[j] = exp(x[j])
    elif kind == ROOT:
        for j in range(len(out)):
            out[j] = np.sqrt(x[j]) if x[j] > 0 else none
    else:
        for j in range(len(out)):
            out[j] = x[j] * sigmoid(x[j])


@piece(of="feature_vjp")
def feature_vjp(x: Vector, y: Vector, kind: Whole, out: Vector):
    """y times the slope of `feature`"""
    one, none = number(out, 1), number(out, 0)
    if kind == ELU_PLUS_ONE:
        for j in range(len(out)):
            out[j] = y[j] * (one if x[j] > 0 else exp(x[j]))
    elif kind == RELU:
        for j in range(len(out)):
            out[j] = y[j] if x[j] > 0 else none
    elif kind == EXP:
        for j in range(len(out)):
            out[j] = y[j] * exp(x[j])
    elif kind == ROOT:
        for j in range(len(out)):
            out[j] = y[j] / (np.sqrt(x[j]) + np.sqrt(x[j])) if x[j] > 0 else none
    else:
        for j in range(len(out)):
            s = sigmoid(x[j])
            out[j] = y[j] * s * (one + x[j] * (one - s))


@piece(of="log_decay_vjp")
def log_decay_vjp(x: Vector, y: Vector, z: Vector, u: Vector, of_rate: Whole, out: Vector):
    """u times the derivative of log_decay by x, or by z, 0 where that is infinite; no y: 0"""
    for j in range(len(out)):
        raw = x[j] + y[j] if len(y) else x[j]
        if of_rate:
            g = -exp(z[j]) * softplus(raw)
            out[j] = u[j] * g if g > -np.inf else number(out, 0)
        else:
            out[j] = -exp(z[j]) * sigmoid(raw) * u[j]


@piece(of="bounded_vjp")
def bounded_vjp(x: Vector, y: Vector, z: Vector, u: Vector, bound: Number, of_rate: Whole, out: Vector):
    """u times the derivative of bounded by x, or by z, 0 where its argument is infinite; no y, no z: 0"""
    one = number(out, 1)
    for j in range(len(out)):
        rate, raw = exp(z[j]) if len(z) else one, x[j] + y[j] if len(y) else x[j]
        a = rate * raw
        s = sigmoid(a)
        slope = bound * u[j] * s * (one - s)
        if of_rate:
            out[j] = slope * a if -np.inf < a < np.inf else number(out, 0)
        else:
            out[j] = slope * rate
