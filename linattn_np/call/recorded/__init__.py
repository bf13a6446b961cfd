"""Plans of NumPy calls whose array calls are traced beyond the inputs of the core: states, and vjp."""
