"""`linattn probe`: properties of the recurrences, measured on constructed inputs without learning.

writing: rebinding a key, least squares; growth: the state over many tokens;
kernels: feature maps against the exponential, and dtypes; lookups: several hops in one call; normalisers: rounding.
"""
