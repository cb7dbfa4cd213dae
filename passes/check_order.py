"""Check that every remaining channel still meets the same channels as before.

Comparing outputs is not enough: one wrong index may change an output by a few parts in a hundred million. So
the small graph is run with labels, too. The labels of a sliced parameter are mapped to the labels that these
indices had before. Two labels that an operation brings together now must be two that were brought together
before, or two of one class, such as those of one head when a single head is left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import fx

from pdp_fx.channels.analysis import observe
from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.channels.record import Record, StandIn
from pdp_fx.compiler import Context, Pass
from pdp_fx.errors import VerifyError
from pdp_fx.example_inputs import Shapes, fresh, trial
from pdp_fx.ops.kinds import owned_names
from pdp_fx.passes.shrink_channels import Shrunk
from pdp_fx.passes.verify_equivalence import Reference
from pdp_fx.weights.writes import idle_in_eval, writes, written_by_element


@dataclass(frozen=True)
class CheckOrder(Pass):
    """Runs the shrunk graph once with labels; does nothing if no channel was removed."""

    name: ClassVar[str] = "check-order"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        shrunk = ctx.find(Shrunk)
        if shrunk is None or ctx.example_inputs is None:
            return False
        with trial(gm):
            inputs, before = fresh(ctx.example_inputs), shrunk.found
            stand_ins = _remaining_stand_ins(gm, before)
            written = written_by_element(gm, writes(gm, owned_names(gm)), idle_in_eval(gm.graph))
            after = observe(gm, inputs, {}, before.grouped, stand_ins, before.inner, written).record
        ctx.put(Shapes({node: values[0].shape for node, values in after.values.items() if values}))
        wrong = _new_meetings(shrunk, after, _is_decided_by_numbers(gm, ctx))
        if wrong:
            raise VerifyError(
                f"removing channels has brought together {wrong} pairs of channels that did not meet before. "
                "This is a bug of this package; the model you gave is untouched"
            )
        return False


def _remaining_stand_ins(gm: fx.GraphModule, before: ChannelMap) -> list[StandIn]:
    """The computed weights that stood for parameters and still do, because nothing of them was pruned."""
    nodes = {node.name for node in gm.graph.nodes}
    return [replace(by, needed=True) for by in before.stand_ins.values() if by.node in nodes]


def _is_decided_by_numbers(gm: fx.GraphModule, ctx: Context) -> bool:
    """Whether outputs are compared in float64, or those of a copy in float64 were found equal before."""
    reference = ctx.find(Reference)
    in_double = all(p.dtype == torch.float64 for p in gm.parameters() if p.is_floating_point())
    return reference is not None and (in_double or not reference.labels)


def _new_meetings(shrunk: Shrunk, after: Record, lenient: bool) -> int:
    """How many pairs of channels meet in the small graph that did not meet in the large one.

    Channels that meet are tied into one class, so channels of different classes have not met.

    Args:
        shrunk: what was removed.
        after: the labels of the small graph.
        lenient: whether heads with a single channel, and a single head that is left, may meet anything, which
            numbers have to judge then.
    """
    before = shrunk.found
    old_label = np.full(after.ties.count, -1)
    for slot, ids in after.slots.items():
        if slot in before.ids:
            # Constants lose nothing; what meets channels is chosen of them.
            stays = ... if slot.constant else ~shrunk.gone[before.slots[slot]]
            old_label[ids.numpy()] = before.ids[slot][stays]
    pairs = old_label[after.ties.joined()]
    left, right = before.classes[pairs]
    stays = np.zeros(len(before.classes), dtype=bool)
    stays[before.stays] = True
    # A channel that must stay meets one that may go only inside a slice that is kept or dropped whole.
    loose = (pairs >= 0).all(axis=0) & (left != right) & (stays[left] == stays[right])
    # If a single head is left, a value that is shared by all heads meets its channels one by one. With
    # several heads the labels of that value were frozen and met none.
    unseen = ~before.met[pairs].all(axis=0)
    # If two tensors with one head left each are joined along the axis of heads, the channels of these two
    # heads lie side by side.
    last = _last_heads(before, shrunk.gone)
    # If of each head one channel is left, its axis has but one index, and the labels of these channels lie
    # along the axis of heads. So they meet whatever else the heads have. If one head is left, those inside it
    # meet whatever its channels have.
    single = last | _singles(before, shrunk.gone) if lenient else np.zeros_like(last)
    heads = (last[left] & last[right]) | single[left] | single[right]
    return int((loose & ~(unseen & stays[left]) & ~heads).sum())


def _last_heads(before: ChannelMap, gone: np.ndarray) -> np.ndarray:
    """For every class, whether it alone is left along some parameter axis, with more than one index there."""
    last = np.zeros(len(before.classes), dtype=bool)
    for classes in before.slots.values():
        left = classes[~gone[classes]]
        if len(left) > 1 and (left == left[0]).all():
            last[left[0]] = True
    return last


def _singles(before: ChannelMap, gone: np.ndarray) -> np.ndarray:
    """For every class, whether along some parameter axis all between two of its indices are gone."""
    single = np.zeros(len(before.classes), dtype=bool)
    for classes in before.slots.values():
        places = np.flatnonzero(~gone[classes])
        left = classes[places]
        alone = (left[1:] == left[:-1]) & (np.diff(places) > 1)
        single[left[1:][alone]] = True
    return single
