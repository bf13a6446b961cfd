"""LEVELS read-out: log-linear attention, from calls of the core (calls.py has the equations)."""
