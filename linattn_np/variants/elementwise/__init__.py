"""Variants of the elementwise core: linear recurrences of every channel by itself."""
