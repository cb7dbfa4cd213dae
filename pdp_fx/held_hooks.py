"""Hooks of layers that only work with all of a layer's channels, such as those that use their number.

A graph calls the hooks of a layer as they are. The run with labels sees the operations in them, but not what
they do with sizes, with attributes of the layer, or with indices. So a copy of the graph is pruned and
converted before any training: where that fails, the channels of these layers stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import fx

from pdp_fx.errors import PdpError, SpecError
from pdp_fx.granularity import Channels
from pdp_fx.schedule import Schedule
from pdp_fx.spec import PruneSpec

MOST_ALONE = 8
"""Of more layers with hooks than these it is not tried which of them it is."""


@dataclass(frozen=True)
class Held:
    """Layers whose channels stay for the sake of their hooks.

    Attributes:
        layers: their names.
        inputs: whether the channels that they read stay, too, and not only those that they make.
    """

    layers: frozenset[str] = frozenset()
    inputs: bool = False


NONE_HELD = Held()


def layers_to_hold(gm: fx.GraphModule, spec: PruneSpec, goes: Callable[[Held], None]) -> Held:
    """The layers with hooks that do not work once channels are gone.

    Args:
        gm: a traced graph.
        spec: what the user asked for.
        goes: prunes and converts a copy of ``gm`` while the channels of some layers stay; raises an error of
            this package if that fails.
    """
    rules = [spec.default, *(rule for _, rule in spec.overrides)]
    hooked = _hooked(gm) if any(isinstance(rule, Channels) for rule in rules) else frozenset[str]()

    def works(held: Held) -> bool:
        try:
            goes(held)
        except SpecError:
            return True  # Nothing is left to prune, and so nothing goes wrong.
        except PdpError:
            return False
        return True

    if not hooked or works(NONE_HELD):
        return NONE_HELD
    held = next((each for each in (Held(hooked), Held(hooked, inputs=True)) if works(each)), NONE_HELD)
    for layer in sorted(held.layers) if len(held.layers) <= MOST_ALONE else ():
        fewer = replace(held, layers=held.layers - {layer})
        held = fewer if works(fewer) else held
    return held


def _hooked(gm: fx.GraphModule) -> frozenset[str]:
    """The layers that the graph calls which have hooks of the user's behind them."""
    called = {str(node.target) for node in gm.graph.find_nodes(op="call_module")}
    return frozenset(name for name in called if gm.get_submodule(name)._forward_hooks)


def at_its_end(spec: PruneSpec) -> PruneSpec:
    """The same spec with a schedule that reaches the target with the first step."""
    return replace(spec, schedule=Schedule(start=0, epsilon=1.0))
