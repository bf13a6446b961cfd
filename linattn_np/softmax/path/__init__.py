"""PaTH: position maps H_t = I - beta_t w_t^T w_t between a query and a key."""
