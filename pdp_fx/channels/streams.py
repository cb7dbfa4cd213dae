"""Residual streams: channels that a layer reads and then adds its output to.

Norms inside a block get masked statistics whenever their channels are pruned. A residual stream runs through
the whole network and through every norm on its way, so it is pruned only if the rule says
``through_norms=True``.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import fx

from pdp_fx.channels.grouping import Stay, distinct
from pdp_fx.channels.labels import Reason
from pdp_fx.channels.record import Record

REMEDY = "Channels(through_norms=True) gives it masked statistics"


def streams(record: Record, graph: fx.Graph, classes: np.ndarray) -> list[Stay]:
    """The classes of residual streams that norms run over, which stay unless a rule lets them go."""
    gated = [site for site in record.norms if site.gated]
    if not gated:
        return []
    made_by: dict[int, set[str]] = {}
    for made in record.producers:
        carried = classes[record.slots[made.slot].numpy()]
        for root in np.intersect1d(classes[made.ids.numpy()], carried).tolist():
            made_by.setdefault(root, set()).add(made.slot.tensor)
    above = _tensors_above(record, graph, {name for names in made_by.values() for name in names})
    sets = {frozenset(names) for names in made_by.values()}
    residual = {names for names in sets if any(above[name] & names - {name} for name in names)}
    found: list[Stay] = []
    for site in gated:
        roots = distinct(classes[site.ids.numpy()])
        if any(frozenset(made_by.get(root, ())) in residual for root in roots.tolist()):
            found.append((roots, Reason(site.node, site.source, site.why, REMEDY)))
    return found


def _tensors_above(record: Record, graph: fx.Graph, names: Iterable[str]) -> dict[str, set[str]]:
    """For each parameter the others that its output depends on."""
    readers: dict[str, set[str]] = {}
    for name in names:
        for reader in (name, name.rpartition(".")[0]):
            readers.setdefault(reader, set()).add(name)
    used_at: dict[str, set[str]] = {}
    for use in record.contractions:
        used_at.setdefault(use.node, set()).add(use.weight)
    above: dict[str, set[str]] = {name: set() for name in names}
    before: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        before[node] = frozenset[str]().union(*(before[source] for source in node.all_input_nodes))
        here = readers.get(str(node.target), set()) if node.op in ("call_module", "get_attr") else set[str]()
        for name in here | (used_at.get(node.name, set()) & above.keys()):
            above[name] |= before[node]
            before[node] |= {name}
    return above
