"""Attention whose values, or weights, come from a computation of their own."""
