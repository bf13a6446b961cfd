"""One loop per variant, token by token in float64, from its recurrence: the reference for every test.

Arrays are (B, T, H, K) and (B, T, H, V), per-token scalars (B, T, H), states (B, H, K, V).
v has one head per state. q and k may have fewer heads, each serving a group of states; q may have more, a group
of them reading one state.
"""

from tests.naive.delta.comba import comba
from tests.naive.delta.delta_product import delta_product
from tests.naive.delta.delta_rule import delta_rule
from tests.naive.delta.gated_delta_rule import gated_delta_rule
from tests.naive.delta.kda import kda
from tests.naive.delta.longhorn import longhorn
from tests.naive.free.dplr import dplr
from tests.naive.free.iplr import iplr
from tests.naive.free.rwkv7 import rwkv7
from tests.naive.no_erase.based import based
from tests.naive.no_erase.dfw import dfw
from tests.naive.no_erase.gla import gla
from tests.naive.no_erase.gsa import abc, gsa
from tests.naive.no_erase.hgrn2 import hgrn2
from tests.naive.no_erase.lightning_attention import lightning_attention
from tests.naive.no_erase.linear_attention import linear_attention
from tests.naive.no_erase.mamba2 import mamba2
from tests.naive.no_erase.mesa_net import mesa_net
from tests.naive.no_erase.mlstm import mlstm
from tests.naive.no_erase.performer import performer
from tests.naive.no_erase.rebased import rebased
from tests.naive.no_erase.retention import retention
from tests.naive.no_erase.retnet import retnet
from tests.naive.no_erase.rfa import rfa
from tests.naive.no_erase.rwkv6 import rwkv6
from tests.naive.no_erase.simple_gla import simple_gla
from tests.naive.no_erase.transxssm import transxssm

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
