from .softmax_attention import attend


def forgetting_attention(q, k, v, g, scale=None, state=None, window=None, normalize=True):
    """p_tj ~ e^{scale q_t . k_j + g_t + ... + g_{j+1}}; out_t = sum_j p_tj v_j."""
    return attend(q, k, v, g, state, scale, window, normalize)
