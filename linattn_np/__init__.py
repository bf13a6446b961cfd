"""linattn_np: linear attention for NumPy and CuPy arrays, forward and hand-derived backward.

    import linattn_np as la
    out = la.gated_delta_rule(q, k, v, g, beta)
    out, state = la.gated_delta_rule(q, k, v, g, beta, state=state, return_state=True)
    result, pullback = la.vjp(la.gated_delta_rule, q, k, v, g, beta)
    grads = pullback(dout)

One function a variant (`VARIANTS` lists them); arrays are (..., T, H, K), time before heads.
"""

from . import testing as testing
from .catalog import *  # noqa: F403  (one function a variant, VARIANTS, CARDS, family_table)
from .cores.kinds import BoundedState as BoundedState
from .cores.kinds import NormalisedState as NormalisedState
from .cores.kinds import SlotState as SlotState
from .cores.kinds import SolvedState as SolvedState
from .cores.kinds import StabilisedState as StabilisedState
from .options import Options as Options
from .pieces import feature_maps as feature_maps
from .read import read as read
from .transforms import Explanation as Explanation
from .transforms import explain as explain
from .transforms import influence_matrix as influence_matrix
from .transforms import vjp as vjp
from .versions import show_versions as show_versions

__version__ = "0.1.0"
