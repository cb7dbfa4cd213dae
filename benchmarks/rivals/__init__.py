"""The methods that PDP is compared with, each as a mask policy written from the method's equations."""

from benchmarks.rivals.acdc import ACDC as ACDC
from benchmarks.rivals.channel_scores import ScoredChannels as ScoredChannels
from benchmarks.rivals.cs import CS as CS
from benchmarks.rivals.dnw import DNW as DNW
from benchmarks.rivals.feather import Feather as Feather
from benchmarks.rivals.fixed import Fixed as Fixed
from benchmarks.rivals.gmp import GMP as GMP
from benchmarks.rivals.granet import GraNet as GraNet
from benchmarks.rivals.movement import Movement as Movement
from benchmarks.rivals.optg import OptG as OptG
from benchmarks.rivals.spartan import Spartan as Spartan
from benchmarks.rivals.sr_ste import SRSTE as SRSTE
from benchmarks.rivals.st3 import ST3 as ST3
from benchmarks.rivals.str_ import STR as STR
