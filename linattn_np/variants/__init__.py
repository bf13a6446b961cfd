"""Floor 3: one file a variant: its card, its docstring, its change of variables and the transpose of that."""
