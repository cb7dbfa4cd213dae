"""The code of a graph in which steps that are skipped at random (`pdp_fx.tracing.skipping`) are conditional.

A graph is flat: its nodes carry in their `meta` the number of the branch that may skip them, and passes need
not know of it. Only the generated code puts what a choice alone needs under the condition of its branch.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from torch import fx

from pdp_fx.tracing.recomputing import lines_of
from pdp_fx.tracing.skipping import kept_unless

SKIPPED = "skipped"
"""The entry of a node's `meta` with the number, from 1, of the branch that may skip it."""


class Block(NamedTuple):
    """What one branch may skip.

    Attributes:
        flag: the node whose truth says that it is skipped.
        inside: the nodes that only its choices need, and those that change something.
        made: those of them that choices read.
    """

    flag: fx.Node
    inside: list[fx.Node]
    made: list[fx.Node]


def gather_blocks(graph: fx.Graph) -> list[Block]:
    """The blocks of a graph, in order; the nodes of each are moved together, before its first choice."""
    choices = dict[int, list[fx.Node]]()
    for node in graph.nodes:
        if node.target is kept_unless:
            choices.setdefault(node.meta[SKIPPED], []).append(node)
    return [block for number, ends in choices.items() if (block := _gathered(graph, number, ends)).inside]


def in_blocks(graph: fx.Graph, blocks: Sequence[Block]) -> Callable[[list[str]], list[str]]:
    """What turns the lines that fx generates for the graph into lines with a condition for each block."""
    nodes = list(graph.nodes)
    starts = {block.inside[0]: block for block in blocks}

    def rewritten(body: list[str]) -> list[str]:
        head, lines = lines_of(body, nodes)
        written, rest = head, iter(nodes)
        for node in rest:
            block = starts.get(node)
            if block is None:
                written += lines[node]
                continue
            members = [node, *(next(rest) for _ in block.inside[1:])]
            written += _conditional(block, members, lines)
        return written

    return rewritten


def _gathered(graph: fx.Graph, number: int, ends: list[fx.Node]) -> Block:
    """The block of a branch, from the choices that it ends with."""
    flag = cast(fx.Node, ends[0].args[0])
    made = {cast(fx.Node, end.args[2]) for end in ends}
    others = {node for end in ends for node in end.all_input_nodes} - made
    nodes, inside = list(graph.nodes), set[fx.Node]()
    places = [place for place, node in enumerate(nodes) if node.meta.get(SKIPPED) == number]
    between = nodes[places[0] : nodes.index(ends[0])] if places else []
    for node in reversed(between):
        needed = bool(node.users) and inside.issuperset(node.users.keys() - set(ends))
        changes = not node.users and node.meta.get(SKIPPED) == number
        if node not in others and (needed or changes):
            inside.add(node)
    members = [node for node in between if node in inside]
    for node in members:
        ends[0].prepend(node)
    return Block(flag, members, [node for node in members if node in made])


def _conditional(block: Block, members: list[fx.Node], lines: dict[fx.Node, list[str]]) -> list[str]:
    """The lines of a block under its condition."""
    own = set(members)
    text = "".join(line for node in members for line in lines[node])
    given = dict.fromkeys(read for node in members for read in node.all_input_nodes if read not in own)
    freed = [repr(node) for node in given if max(node.users) in own]
    unset = [*(repr(node) for node in block.made), *freed]
    return [
        f"if not {block.flag!r}:\n",
        *(f"    {line}\n" for line in text.split("\n") if line),
        "else:\n",
        f"    {' = '.join([*unset, 'None'])}\n",
    ]
