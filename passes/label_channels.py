"""Find which channels depend on each other, by running the graph with labels (`pdp_fx.channels`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import fx

from pdp_fx.channels.analysis import Observed, observe, structure
from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.channels.choices import choose
from pdp_fx.channels.elsewhere import heed_other_sizes
from pdp_fx.channels.record import Record
from pdp_fx.compiler import Context, Pass
from pdp_fx.example_inputs import fresh, trial
from pdp_fx.held_hooks import NONE_HELD, Held
from pdp_fx.passes.find_sites import FindSites, Sites
from pdp_fx.spec import PruneSpec
from pdp_fx.tracing.examples import ExampleCall, Inputs
from pdp_fx.tracing.generators import random_state
from pdp_fx.tracing.modes import in_eval_form
from pdp_fx.tracing.outcome import Given, Outcome, outcome
from pdp_fx.tracing.verify import called


class LabelWatch:
    """Runs the graph with labels when the tracer checks its result, which saves a run of its own.

    Attributes:
        record: what the last run has shown of the labels; None before it, or if it failed.
        sites: the weights of the graph that was run.
        outcome: what that run gave, which masks may not change; None if it drew random numbers.
    """

    def __init__(self, spec: PruneSpec) -> None:
        self.record: Record | None = None
        self.sites: Sites | None = None
        self.outcome: Outcome | None = None
        self._spec = spec

    def __call__(self, gm: fx.GraphModule, call: ExampleCall) -> Any:
        """Run ``gm`` in eval mode and return its output."""
        self.record = self.outcome = None
        inputs = (call.args, dict(call.kwargs))
        ctx = Context(self._spec, inputs)
        FindSites().run(gm, ctx)
        sites = self.sites = ctx.get(Sites)
        drawn, given = random_state(), Given(inputs)
        with in_eval_form(gm.graph):
            observed = _observed(sites, gm, inputs)
        if random_state() == drawn:
            self.outcome = outcome(gm, observed.output, given)
        self.record = observed.record
        return observed.output


@dataclass(frozen=True)
class LabelChannels(Pass):
    """Puts a `ChannelMap` into the context if there are example inputs."""

    name: ClassVar[str] = "label-channels"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        inputs = ctx.example_inputs
        if inputs is None:
            return False
        with in_eval_form(gm.graph):
            ctx.put(_channels(gm, ctx, inputs))
        return False


def _observed(
    sites: Sites,
    gm: fx.GraphModule,
    inputs: Inputs,
    inner: frozenset[str] = frozenset(),
    held: Held = NONE_HELD,
) -> Observed:
    """`observe`, with what is known of the weights."""
    by_element, read_raw = sites.element_by_element, sites.read_raw
    return observe(gm, inputs, sites.out_of_reach, {}, sites.stand_ins, inner, by_element, read_raw, held)


def _channels(gm: fx.GraphModule, ctx: Context, inputs: Inputs) -> ChannelMap:
    sites, through_norms = ctx.get(Sites), ctx.spec.through_norms

    held = ctx.find(Held) or NONE_HELD

    def observed(call: Inputs, inner: frozenset[str] = frozenset()) -> Record:
        with trial(gm):
            return _observed(sites, gm, fresh(call), inner, held).record

    def taken(call: ExampleCall) -> None:
        with trial(gm):
            called(gm, call.fresh())

    watch = ctx.find(LabelWatch)
    known = watch.record if watch is not None and not held.layers else None
    first = observed(inputs) if known is None else known
    record = choose(first, lambda each: structure(each, gm, inputs, through_norms), partial(observed, inputs))
    # Whether a stream stays because of its norms does not depend on sizes; the example decides.
    heed_other_sizes(
        record,
        gm,
        inputs,
        lambda call: structure(observed(call, record.inner), gm, call, through_norms=True),
        taken,
    )
    return structure(record, gm, inputs, through_norms)
