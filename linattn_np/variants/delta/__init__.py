"""Variants of the delta rule: a token takes out of the state what its key predicts."""
