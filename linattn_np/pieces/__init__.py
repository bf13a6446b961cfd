"""Floor 1: small functions, f and f_vjp on neighbouring lines."""
