"""Variants of the softmax core."""
