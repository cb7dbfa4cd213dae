"""Find which channels depend on each other, by running the graph with labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from pdp_fx.channels.analysis import analyse
from pdp_fx.compiler import Context, Pass
from pdp_fx.example_inputs import fresh, trial
from pdp_fx.passes.find_sites import Sites


@dataclass(frozen=True)
class LabelChannels(Pass):
    """Leaves a `ChannelMap` in the context when there are example inputs to run."""

    name: ClassVar[str] = "label-channels"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        if ctx.example_inputs is not None:
            with trial(gm):
                maskable = ctx.get(Sites).maskable
                ctx.put(analyse(gm, fresh(ctx.example_inputs), maskable, ctx.spec.through_norms))
        return False
