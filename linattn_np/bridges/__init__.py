"""Other frameworks: their arrays in the functions of linattn_np, and the functions in their compilers."""
