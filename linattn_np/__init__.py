"""linattn_np: linear attention for NumPy and CuPy arrays, forward and hand-derived backward.

    import linattn_np as la
    out = la.gated_delta_rule(q, k, v, g, beta)
    out, state = la.gated_delta_rule(q, k, v, g, beta, state=state, return_state=True)
    result, pullback = la.vjp(la.gated_delta_rule, q, k, v, g, beta)
    grads = pullback(dout)

One function a variant (`VARIANTS` lists them); arrays are (..., T, H, K), time before heads.
"""

from . import testing
from .call import Options
from .catalog import CARDS, VARIANTS, family_table
from .doctor import show_versions
from .read import read
from .transforms import Explanation, explain, influence_matrix, vjp
from .variants.comba import comba
from .variants.delta_rule import delta_rule
from .variants.dplr import dplr
from .variants.gated_delta_rule import gated_delta_rule
from .variants.gla import gla
from .variants.iplr import iplr
from .variants.kda import kda
from .variants.lightning_attention import lightning_attention
from .variants.linear_attention import NormalisedState, linear_attention
from .variants.mamba2 import mamba2
from .variants.retention import retention
from .variants.rwkv6 import rwkv6
from .variants.rwkv7 import rwkv7
from .variants.simple_gla import simple_gla

__version__ = "0.1.0"

__all__ = [
    "CARDS",
    "VARIANTS",
    "Explanation",
    "NormalisedState",
    "Options",
    "comba",
    "delta_rule",
    "dplr",
    "explain",
    "family_table",
    "gated_delta_rule",
    "gla",
    "influence_matrix",
    "iplr",
    "kda",
    "lightning_attention",
    "linear_attention",
    "mamba2",
    "read",
    "retention",
    "rwkv6",
    "rwkv7",
    "show_versions",
    "simple_gla",
    "testing",
    "vjp",
]
