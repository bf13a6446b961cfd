"""One file per variant: its spec, its docstring, its change of variables and the transpose."""
