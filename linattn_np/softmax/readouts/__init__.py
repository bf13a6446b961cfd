"""Attention whose values or weights are computed first."""
