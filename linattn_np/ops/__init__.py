"""Small functions, f and f_vjp on neighbouring lines."""
