"""Compiled loops of linear learners."""
