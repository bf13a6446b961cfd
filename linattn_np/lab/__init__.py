"""Experiments on real text: what a memory can hold, measured."""
