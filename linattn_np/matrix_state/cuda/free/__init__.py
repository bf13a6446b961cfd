"""Erase FREE with a decay of the key channels, or none; capability 90."""
