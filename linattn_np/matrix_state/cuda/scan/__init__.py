"""Erase NONE with decay NONE or SCALAR: passes over the tokens."""
