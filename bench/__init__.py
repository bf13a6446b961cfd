"""Measurements: `python -m bench NAME`. Results with versions and machine lie under bench/results/."""
