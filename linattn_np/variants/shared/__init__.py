"""Changes of variables that several variants share, each with its transpose."""
