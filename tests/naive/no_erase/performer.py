"""Performer, token by token."""

from tests.naive.features import favor
from tests.naive.no_erase.linear_attention import linear_attention


def performer(q, k, v, num_features=None, seed=0, hyperbolic=False, normalize=True, **options):
    """Linear attention of phi(x) = e^{w . y - |y|^2 / 2} / sqrt(M)."""
    phi = (lambda x: favor(x, num_features, seed, hyperbolic), None)
    return linear_attention(q, k, v, feature_map=(phi, phi), normalize=normalize, **options)
