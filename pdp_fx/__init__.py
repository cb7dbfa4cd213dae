"""pdp-fx: a torch.fx compiler that prunes PyTorch models while they train.

`prepare` traces a model and inserts masks, `step` advances the schedule while you train, and `convert` makes
the masks permanent. All public names are here; modules below this one may change.
"""

from pdp_fx.api import convert as convert
from pdp_fx.api import penalty as penalty
from pdp_fx.api import prepare as prepare
from pdp_fx.api import step as step
from pdp_fx.channel_graph import channel_graph as channel_graph
from pdp_fx.channel_policy import ChannelPolicy as ChannelPolicy
from pdp_fx.drawing import draw_channels as draw_channels
from pdp_fx.errors import PassError as PassError
from pdp_fx.errors import PdpError as PdpError
from pdp_fx.errors import SpecError as SpecError
from pdp_fx.errors import StateError as StateError
from pdp_fx.errors import TraceError as TraceError
from pdp_fx.errors import VerifyError as VerifyError
from pdp_fx.explain import Explanation as Explanation
from pdp_fx.explain import explain as explain
from pdp_fx.policy import MaskPolicy as MaskPolicy
from pdp_fx.policy import MaskSite as MaskSite
from pdp_fx.policy import NMPolicy as NMPolicy
from pdp_fx.policy import Progress as Progress
from pdp_fx.policy import WeightPolicy as WeightPolicy
from pdp_fx.printing import graph_diff as graph_diff
from pdp_fx.printing import print_graph as print_graph
from pdp_fx.report import Report as Report
from pdp_fx.report import report as report
from pdp_fx.shrink_mask import ShrinkMask as ShrinkMask
from pdp_fx.spec import NM as NM
from pdp_fx.spec import Channels as Channels
from pdp_fx.spec import PruneSpec as PruneSpec
from pdp_fx.spec import Schedule as Schedule
from pdp_fx.spec import Unstructured as Unstructured
from pdp_fx.tau_search import find_tau as find_tau
from pdp_fx.transplant import transplant as transplant
