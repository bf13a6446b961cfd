"""Variants of the delta rule: a token subtracts from the state the value that its key predicts."""
