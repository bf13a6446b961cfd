"""One loop a variant, token by token in float64, straight from its recurrence: what the library is compared with.

Arrays are (B, T, H, K) and (B, T, H, V), per-token scalars (B, T, H), states (B, H, K, V).
v has one head a state. q and k may have fewer heads, each serving a group of states; q may have more, a group
of them reading one state.
"""

from tests.naive.based import based
from tests.naive.comba import comba
from tests.naive.delta_product import delta_product
from tests.naive.delta_rule import delta_rule
from tests.naive.dfw import dfw
from tests.naive.dplr import dplr
from tests.naive.gated_delta_rule import gated_delta_rule
from tests.naive.gla import gla
from tests.naive.gsa import abc, gsa
from tests.naive.hgrn2 import hgrn2
from tests.naive.iplr import iplr
from tests.naive.kda import kda
from tests.naive.lightning_attention import lightning_attention
from tests.naive.linear_attention import linear_attention
from tests.naive.longhorn import longhorn
from tests.naive.mamba2 import mamba2
from tests.naive.mesa_net import mesa_net
from tests.naive.mlstm import mlstm
from tests.naive.performer import performer
from tests.naive.rebased import rebased
from tests.naive.retention import retention
from tests.naive.retnet import retnet
from tests.naive.rfa import rfa
from tests.naive.rwkv6 import rwkv6
from tests.naive.rwkv7 import rwkv7
from tests.naive.simple_gla import simple_gla
from tests.naive.transxssm import transxssm

NAIVE = {
    "linear_attention": linear_attention,
    "retention": retention,
    "lightning_attention": lightning_attention,
    "simple_gla": simple_gla,
    "mamba2": mamba2,
    "mlstm": mlstm,
    "mesa_net": mesa_net,
    "gla": gla,
    "rwkv6": rwkv6,
    "delta_rule": delta_rule,
    "gated_delta_rule": gated_delta_rule,
    "comba": comba,
    "kda": kda,
    "dplr": dplr,
    "rwkv7": rwkv7,
    "iplr": iplr,
    "performer": performer,
    "based": based,
    "rebased": rebased,
    "rfa": rfa,
    "hgrn2": hgrn2,
    "dfw": dfw,
    "longhorn": longhorn,
    "delta_product": delta_product,
    "retnet": retnet,
    "transxssm": transxssm,
    "gsa": gsa,
    "abc": abc,
}
