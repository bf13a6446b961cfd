"""One file a variant: its spec, its docstring, its change of variables and the transpose of that."""
