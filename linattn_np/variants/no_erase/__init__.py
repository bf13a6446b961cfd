"""Variants that erase nothing: S_t = diag(e^{g_t}) S_{t-1} + k_t^T v_t."""
