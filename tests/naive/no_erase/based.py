"""Based, token by token."""

from tests.naive.features import taylor
from tests.naive.no_erase.linear_attention import linear_attention


def based(q, k, v, order=2, normalize=True, **options):
    """Linear attention of phi(q) . phi(k) = sum_{p <= order} z^p / p!, z = q . k / sqrt(K)."""
    phi = (lambda x: taylor(x, order), None)
    return linear_attention(q, k, v, feature_map=(phi, phi), normalize=normalize, **options)
