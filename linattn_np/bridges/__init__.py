"""Bridges to frameworks: each module imports its framework itself."""
