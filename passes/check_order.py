"""Check that every channel that is left still meets the channels it met before.

The numbers cannot tell: one wrong index may move an output by a few parts in a hundred million. So
labels flow through the small graph, too. Each label of a sliced parameter is known under its old
name; two labels that an operation brings together now must be two that it brought together before,
or two that always go together, such as those of one head when a single head is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import fx

from pdp_fx.channels.analysis import analyse
from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.compiler import Context, Pass
from pdp_fx.errors import VerifyError
from pdp_fx.example_inputs import fresh, trial
from pdp_fx.passes.shrink_channels import Shrunk


@dataclass(frozen=True)
class CheckOrder(Pass):
    """Runs the shrunk graph once with labels; does nothing where no channel was removed."""

    name: ClassVar[str] = "check-order"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        shrunk = ctx.find(Shrunk)
        if shrunk is None or ctx.example_inputs is None:
            return False
        with trial(gm):
            after = analyse(
                gm, fresh(ctx.example_inputs), frozenset(), ctx.spec.through_norms, shrunk.found.grouped
            )
        wrong = _new_meetings(shrunk, after)
        if wrong:
            raise VerifyError(
                f"removing channels has brought together {wrong} pairs of channels that did not meet before. "
                "This is a bug of this package; the model you gave is untouched"
            )
        return False


def _new_meetings(shrunk: Shrunk, after: ChannelMap) -> int:
    """How many pairs of channels meet in the small graph that did not meet in the large one."""
    before = shrunk.found
    old_name = np.full(len(after.classes), -1)
    for slot, ids in after.ids.items():
        if slot in before.ids:
            stays = ~np.isin(before.slots[slot], shrunk.gone)
            old_name[ids] = before.ids[slot][stays]
    pairs = np.sort(old_name[after.pairs], axis=0)
    roots = before.classes[pairs]
    loose = (pairs[0] >= 0) & (roots[0] != roots[1])
    # A channel that must stay meets one that may go only inside a slice that is kept or dropped whole.
    loose &= np.isin(roots[0], before.stays) == np.isin(roots[1], before.stays)
    # Where a single head is left, a value shared by all heads meets it by channels; with several heads it
    # stayed, and was followed no further.
    unseen = ~np.isin(pairs, before.pairs).all(axis=0)
    loose &= ~(unseen & np.isin(roots[0], before.stays))
    pairs = pairs[:, loose]
    count = len(before.classes)
    return int((~np.isin(pairs[0] * count + pairs[1], before.pairs[0] * count + before.pairs[1])).sum())
