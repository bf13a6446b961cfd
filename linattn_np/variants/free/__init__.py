"""Variants with a free rank-one term: S_t = (diag(e^{g_t}) + b_t^T a_t) S_{t-1} + k_t^T v_t."""
