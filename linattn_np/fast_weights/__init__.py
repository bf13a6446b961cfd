"""The fast-weights core: weights that learn from the tokens by gradient descent."""
