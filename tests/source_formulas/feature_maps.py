"""Feature maps given from outside the library, each a pair f(x) and f_vjp(x, dphi)."""

import numpy as np


def elu_plus_one(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def relu_plus(x):
    return np.maximum(x, 0) + 0.01


ELU_PLUS_ONE = (elu_plus_one, lambda x, dphi: dphi * np.exp(np.minimum(x, 0)))
RELU_PLUS = (relu_plus, lambda x, dphi: dphi * (x > 0))
