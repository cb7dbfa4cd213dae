"""Erasing nodes together with what only they have used."""

from collections.abc import Callable

from torch import fx


def erase(node: fx.Node, may_go: Callable[[fx.Node], bool]) -> None:
    """Erase a node, and then each of its inputs that has no other users and that ``may_go`` allows."""
    todo = [node]
    while todo:
        gone = todo.pop()
        sources = gone.all_input_nodes
        gone.graph.erase_node(gone)
        todo += [source for source in sources if not source.users and may_go(source)]
