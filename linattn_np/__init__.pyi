# Written by `python docs/make_lists.py`.

from . import testing as testing
from .call.check import check as check
from .call.explain import Explanation as Explanation
from .call.explain import explain as explain
from .call.influence import influence_matrix as influence_matrix
from .call.options import Options as Options
from .call.read import read as read
from .call.step import step as step
from .call.vjp import vjp as vjp
from .catalog import family_table as family_table
from .matrix_state.types import BoundedState as BoundedState
from .matrix_state.types import NormalisedState as NormalisedState
from .matrix_state.types import SlotState as SlotState
from .matrix_state.types import SolvedState as SolvedState
from .matrix_state.types import StabilisedState as StabilisedState
from .ops import feature_maps as feature_maps
from .runtime.versions import show_versions as show_versions
from .spec import VariantFunction as _VariantFunction
from .spec import VariantSpec as VariantSpec
from .variants.delta.comba import comba as comba
from .variants.delta.delta_product import delta_product as delta_product
from .variants.delta.delta_rule import delta_rule as delta_rule
from .variants.delta.efla import efla as efla
from .variants.delta.gated_delta_rule import gated_delta_rule as gated_delta_rule
from .variants.delta.gdn2 import gdn2 as gdn2
from .variants.delta.kda import kda as kda
from .variants.delta.longhorn import longhorn as longhorn
from .variants.free.dplr import dplr as dplr
from .variants.free.dplr import rwkv7 as rwkv7
from .variants.free.iplr import iplr as iplr
from .variants.no_erase.based import based as based
from .variants.no_erase.dfw import dfw as dfw
from .variants.no_erase.gla import gla as gla
from .variants.no_erase.gsa import abc as abc
from .variants.no_erase.gsa import gsa as gsa
from .variants.no_erase.hgrn2 import hgrn2 as hgrn2
from .variants.no_erase.lightning_attention import lightning_attention as lightning_attention
from .variants.no_erase.linear_attention import linear_attention as linear_attention
from .variants.no_erase.mamba2 import mamba2 as mamba2
from .variants.no_erase.mamba2 import transxssm as transxssm
from .variants.no_erase.mesa_net import mesa_net as mesa_net
from .variants.no_erase.mlstm import mlstm as mlstm
from .variants.no_erase.performer import performer as performer
from .variants.no_erase.rebased import rebased as rebased
from .variants.no_erase.retention import retention as retention
from .variants.no_erase.retention import retnet as retnet
from .variants.no_erase.rfa import rfa as rfa
from .variants.no_erase.rwkv6 import rwkv6 as rwkv6
from .variants.no_erase.simple_gla import simple_gla as simple_gla

__version__: str
VARIANTS: tuple[_VariantFunction, ...]
SPECS: tuple[VariantSpec, ...]
