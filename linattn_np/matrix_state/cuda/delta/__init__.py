"""The delta rule with decay NONE or SCALAR; capability 90."""
