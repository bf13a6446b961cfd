"""Preconditioned KDA, token by token."""

from tests.naive.delta.preconditioned_gated_delta_rule import preconditioned_gated_delta_rule


def preconditioned_kda(*arrays, **options):
    """preconditioned_gated_delta_rule with one log decay per key channel, g (B, T, H, K)."""
    return preconditioned_gated_delta_rule(*arrays, **options)
