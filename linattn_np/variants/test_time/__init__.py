"""Variants of the fast-weights core: their weights learn at test time."""
