"""The code of a graph in which steps that a run does not need are conditional.

A graph is flat: it computes what a model computes in training only also where that is not picked
(`pdp_fx.tracing.emit`), and its nodes carry in their `meta` the number of the branch that may skip them at
random (`pdp_fx.tracing.skipping`). Passes need not know of either. Only the generated code puts what one mode
alone needs under the condition of its flag, and what a choice alone needs under that of its branch.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, cast

from torch import fx
from torch.fx.graph import _format_target
from torch.fx.node import map_arg

from pdp_fx.tracing.modes import When, asks_mode
from pdp_fx.tracing.recomputing import lines_of
from pdp_fx.tracing.restoring import changed_settings
from pdp_fx.tracing.skipping import kept_unless

SKIPPED = "skipped"
"""The entry of a node's `meta` with the number, from 1, of the choice that may skip it; negative if it runs
only where others are skipped."""

MAY_WAIT = "may wait"
"""The entry of a node's `meta` that says it need not run where nothing reads its result."""


class Block(NamedTuple):
    """What may be left out together.

    Attributes:
        condition: the code that is true where it runs.
        inside: the nodes that only what reads them then needs, and those that change something; consecutive.
        made: those of them that others read.
    """

    condition: str
    inside: list[fx.Node]
    made: list[fx.Node]


def gather_blocks(graph: fx.Graph) -> list[Block]:
    """The blocks of a graph; the nodes of one that is skipped at random are moved before its first choice."""
    choices = dict[int, list[fx.Node]]()
    for node in graph.nodes:
        if node.target is kept_unless:
            choices.setdefault(node.meta[SKIPPED], []).append(node)
    ways = ((sign * number, ends) for number, ends in choices.items() for sign in (1, -1))
    skipped = [block for number, ends in ways if (block := _gathered(graph, number, ends)).inside]
    inside = {node for block in skipped for node in block.inside}
    borders = {node for span in changed_settings(graph) for node in span}
    return skipped + list(_blocks_of_modes(graph, inside | borders))


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
    """The block of one way of a branch, from the choices that it ends with."""
    flag = cast(fx.Node, ends[0].args[0])
    chosen = 2 if number > 0 else 1
    nodes, inside = list(graph.nodes), set[fx.Node]()
    places = [place for place, node in enumerate(nodes) if node.meta.get(SKIPPED) == number]
    between = nodes[places[0] : nodes.index(ends[0])] if places else []
    given = [dict(enumerate(cast(tuple[fx.Node, ...], end.args))) for end in ends]
    made = {values.pop(chosen) for values in given}
    others = {value for values in given for value in values.values()}
    for node in reversed(between):
        needed = bool(node.users) and inside.issuperset(node.users.keys() - set(ends))
        changes = not node.users and node.meta.get(SKIPPED) == number
        if node not in others and (needed or changes):
            inside.add(node)
    members = [node for node in between if node in inside]
    for node in members:
        ends[0].prepend(node)
    condition = f"not {flag!r}" if number > 0 else repr(flag)
    return Block(condition, members, [node for node in members if node in made])


_Mode = tuple[str, bool]
"""The path of a module, and the training flag it must have."""


def _blocks_of_modes(graph: fx.Graph, elsewhere: set[fx.Node]) -> Iterator[Block]:
    """The runs of nodes that one mode alone needs, without those ``elsewhere``."""
    needed = _needed_in(graph, elsewhere)
    for mode, run in groupby(list(graph.nodes), needed.get):
        inside = list(run)
        if mode is not None and any(node.op != "get_attr" for node in inside):
            path, training = mode
            flag = _format_target("self", f"{path}.training")
            made = [node for node in inside if not node.users.keys() <= set(inside)]
            yield Block(flag if training else f"not {flag}", inside, made)


def _needed_in(graph: fx.Graph, elsewhere: set[fx.Node]) -> dict[fx.Node, _Mode]:
    """The nodes that need to run in one mode only, with that mode."""
    needed = dict[fx.Node, _Mode]()
    for node in reversed(graph.nodes):
        readers = {mode for user in node.users for mode in _reading(user, node, needed)}
        mode = readers.pop() if len(readers) == 1 else None
        if mode is not None and node not in elsewhere and (node.op == "get_attr" or MAY_WAIT in node.meta):
            needed[node] = mode
    return needed


def _reading(user: fx.Node, node: fx.Node, needed: dict[fx.Node, _Mode]) -> Iterator[_Mode | None]:
    """In which modes a node is read by another; None stands for both."""
    picked = user.args[0] if user.target is operator.getitem else None
    flag = user.args[1] if isinstance(picked, dict) else None
    flag = user.args[0] if isinstance(user.target, When) else flag
    mode = None if flag is node else _mode(flag)
    if mode is None:
        yield needed.get(user)
    elif isinstance(picked, dict):
        parts = cast(dict[bool, Any], picked).items()
        yield from ((mode[0], training == mode[1]) for training, part in parts if node in _nodes_of(part))
    else:
        yield mode


def _mode(flag: Any) -> _Mode | None:
    """The mode in which a training flag, or its negation, is true; None if it is none."""
    if not isinstance(flag, fx.Node):
        return None
    if flag.target is operator.not_:
        mode = _mode(flag.args[0])
        return None if mode is None else (mode[0], not mode[1])
    owner = flag.args[0] if asks_mode(flag) else None
    return (str(owner.target), True) if isinstance(owner, fx.Node) and owner.op == "get_attr" else None


def _nodes_of(tree: Any) -> set[fx.Node]:
    found = set[fx.Node]()
    map_arg(tree, found.add)
    return found


def _conditional(block: Block, members: list[fx.Node], lines: dict[fx.Node, list[str]]) -> list[str]:
    """The lines of a block under its condition."""
    own = set(members)
    text = "".join(line for node in members for line in lines[node])
    given = dict.fromkeys(read for node in members for read in node.all_input_nodes if read not in own)
    freed = [repr(node) for node in given if max(node.users) in own]
    unset = [*(repr(node) for node in block.made), *freed]
    return [
        f"if {block.condition}:\n",
        *(f"    {line}\n" for line in text.split("\n") if line),
        "else:\n",
        f"    {' = '.join([*unset, 'None'])}\n",
    ]
