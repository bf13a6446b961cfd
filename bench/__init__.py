"""Measurements: `python -m bench NAME`.

cpu/ and cuda/ hold the measurements of one kind of device; results, with versions and machine, go to results/.
"""
