"""Branches that ask whether anything is selected, as a layer of experts asks for each expert.

``if rows.numel() == 0: continue`` and ``if mask.any(): ...`` depend on data, but only to save work: for no
rows the branch does nothing. A recording takes all such branches as if something were selected, and so the
graph does always. That this gives the same for an empty selection is shown: the model runs once more with
every second of these branches told that nothing is selected, and the graph, in which these selections are
made empty (`verify.emptying`), must give the same. If not, what branches is kept whole. A branch may also
leave out a mask, where it masks nothing (`pdp_fx.tracing.masking`).

The gradients of a layer that no row goes through are then 0, not None.
"""

import operator
from collections.abc import Container, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

from torch import fx

from pdp_fx.tracing.align import Alignment, kind_of_step
from pdp_fx.tracing.arguments import all_values
from pdp_fx.tracing.functions import acts_in_place, written_by
from pdp_fx.tracing.modes import When, function_of
from pdp_fx.tracing.sizes import if_any
from pdp_fx.tracing.steps import Expr, Recording, Step, is_ragged

SELECTS = "selects"
"""The entry of a node's `meta` with the number, from 1, of the selection that it makes."""

IDLE = "idle"
"""The entry of a node's `meta` with the number of the selection without which it does nothing."""

_COUNTS = frozenset({"size", "numel", operator.getitem})
_FINDS = frozenset({"nonzero", "where", "argwhere"})
LOOKS = frozenset(
    "view reshape flatten squeeze unsqueeze contiguous bool to detach clone t transpose permute".split()
)
"""What gives the numbers of its first argument, in another shape, memory or dtype."""
_COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_SAYS = _COMPARES | {"any", "all", "logical_and", "logical_or", "logical_xor", "logical_not", "isin"}
"""What gives booleans only."""
_INVERTS = frozenset({"invert", "__invert__", "bitwise_not"})


def asks_any(value: Any) -> tuple[Step, bool, bool] | None:
    """The selection of which the truth of a tensor tells whether it is empty.

    Returns:
        The step that makes its mask, the truth if it is not empty, and whether it selects what is False.
    """
    if not isinstance(value, Step):
        return None
    kept = _source(_operand(value, {"all"}))
    if kept is not None and kept.boolean:
        return kept, False, True
    truth: bool | None = True
    counted = _operand(value, {"any"})
    if value.called in _COMPARES and len(value.args) == 2:
        truth = if_any(getattr(operator, value.called), value.args[1])
        counted = _operand(value.args[0], {"sum", "count_nonzero"})
        if counted is not None and counted.called not in _SAYS:
            return None
    mask = _source(counted)
    return None if mask is None or truth is None else (mask, truth, False)


def selection(count: Any) -> Step | None:
    """The step that makes a mask which is all False or 0 if a count is 0; None if none is known to."""
    if isinstance(count, Expr):
        return selection(count.args[0]) if count.call in _COUNTS else None
    if not isinstance(count, Step) or count.reason:
        return None
    if count.called in _FINDS and len(count.args) == 1:
        return _source(count.args[0])
    if count.called == "masked_select" and len(count.args) == 2:
        return _source(count.args[1])
    if count.called in LOOKS:
        return selection(count.args[0])
    if count.called != "getitem":
        return None
    index = next((part for part in all_values(count.args[1]) if isinstance(part, Step | Expr)), None)
    mask = _source(index)
    return mask if mask is not None and (mask.called in _SAYS or not is_ragged(index)) else selection(index)


def says(step: Step) -> bool:
    """Whether a step makes booleans, in memory of their own."""
    inverted = _operand(step, _INVERTS)
    return step.called in _SAYS if inverted is None else says(inverted)


def _operand(value: Any, names: Container[str]) -> Step | None:
    """The one operand of a step of one of these names."""
    alone = isinstance(value, Step) and value.called in names and len(value.args) == 1 and not value.kwargs
    return value.args[0] if alone and isinstance(value.args[0], Step) else None


def _source(mask: Any) -> Step | None:
    """The step that has made the numbers which a mask looks at, which are all 0 if those of the mask are."""
    cast = False
    while isinstance(mask, Step) and mask.called in LOOKS and mask.args and isinstance(mask.args[0], Step):
        cast |= mask.called == "to"
        mask = mask.args[0]
    if not isinstance(mask, Step) or (mask.op == "placeholder" and not mask.boolean):
        return None
    known = mask.boolean or not cast
    return mask if known else None


def selects_alike(alignment: Alignment) -> bool:
    """Whether steps that both modes share make the same selections, and are left out for the same ones."""
    shared = [(pair.in_eval, pair.in_train) for pair in alignment.pairs if pair.in_eval and pair.in_train]
    return all((one.selects, one.idle) == (other.selects, other.idle) for one, other in shared)


def note_idle(full: Recording, other: Recording, empty: Container[int]) -> bool:
    """Note of the steps which the model leaves out where a selection is empty that they do nothing then.

    Args:
        full: a recording for which no selection was empty; its steps are changed.
        other: one that was told of some that they are.
        empty: those.

    Returns:
        Whether that is all in which the two differ.
    """
    numbers = [0, *(asked.number for asked in full.asked)]
    if numbers != [0, *(asked.number for asked in other.asked)]:
        return False
    for number, steps, others in zip(
        numbers, full.between(full.asked), other.between(other.asked), strict=True
    ):
        left_out = len(steps) - len(others) if number in empty else 0
        if left_out < 0 or list(map(kind_of_step, steps[left_out:])) != list(map(kind_of_step, others)):
            return False
        for step in steps[:left_out]:
            step.idle = number
    return True


def does_more(graph: fx.Graph, empty: Container[int], observed: AbstractSet[fx.Node]) -> fx.Node | None:
    """A node that may do something, for other numbers than the example's, though nothing is selected.

    What an empty selection leaves out may compute with what is selected, and write that into something by
    where it was selected. Anything else may have changed nothing by chance.

    Args:
        graph: the graph.
        empty: the numbers of the selections.
        observed: the nodes whose results had no elements when these were empty.
    """
    nodes = list(graph.nodes)
    reads = [node for node in reversed(nodes) if _name(node) in _READS and node.users]
    numbers = {node.meta[IDLE] for node in nodes if node.meta.get(IDLE, 0) in empty}
    for number in numbers:
        idle = {node for node in nodes if node.meta.get(IDLE) == number}
        for node in reads:
            # What is read of parts and sizes on the way belongs to no step.
            if idle.issuperset(node.users) and not idle.isdisjoint(node.all_input_nodes):
                idle.add(node)
        rules = _Rules(idle, {node for node in nodes if node.meta.get(SELECTS) == number})
        for node in nodes:
            if node in observed and rules.is_gone(node):
                rules.gone.add(node)
        more = next((node for node in nodes if node in idle and not rules.does_nothing(node)), None)
        if more is not None:
            return more
    return None


class _Rules:
    """What nodes give, if masks select nothing."""

    def __init__(self, idle: AbstractSet[fx.Node], masks: AbstractSet[fx.Node]) -> None:
        self.idle, self.masks = idle, masks
        self.gone = set[fx.Node]()

    def is_gone(self, node: fx.Node) -> bool:
        """Whether it is for want of what is selected that there are no elements, not just on the example."""
        given, name = node.all_input_nodes, _name(node)
        if name in _JOINS:
            return self.gone.issuperset(given)
        first, where = [*_args(node), None, None][:2]
        finds = name in _FINDS and where is None and self._is_mask(first)
        picks = name in ("getitem", "masked_select") and self._picks_none(where)
        return finds or picks or not self.gone.isdisjoint(given)

    def does_nothing(self, node: fx.Node) -> bool:
        """Whether what a node gives and changes, as far as others see it, is as if it were left out."""
        if node.meta.get("opaque"):
            return False
        outside = [user for user in node.users if user not in self.idle]
        if node in self.gone:
            return all(_name(user) in _JOINS for user in outside)
        changes = acts_in_place(node) and not all(map(self._is_own, written_by(node)))
        return not (outside or changes) or self.is_same(node)

    def _is_own(self, node: fx.Node) -> bool:
        """Whether a tensor has no elements, or is made anew."""
        return node in self.gone or (node in self.idle and _name(node) in _MAKES)

    def is_same(self, node: Any) -> bool:
        """Whether a node gives what is there if it is left out."""
        if not isinstance(node, fx.Node) or node not in self.idle:
            return True
        name, args = _name(node), _args(node)
        if name in _WRITES:
            return self._writes_none(node) and self.is_same(args[0])
        if name in ("add", "iadd") and len(args) == 2:
            return any(self.is_zero(a) and self.is_same(b) for a, b in (args, args[::-1]))
        return name in LOOKS and self.is_same(args[0])

    def is_zero(self, node: Any) -> bool:
        """Whether a node gives zeros: rows are written into them, and they are multiplied."""
        if not isinstance(node, fx.Node) or node not in self.idle:
            return False
        name, args = _name(node), _args(node)
        if name in _WRITES:
            return self._writes_none(node) and self.is_zero(args[0])
        if name in ("mul", "imul"):
            return any(map(self.is_zero, args))
        return name in _MAKES or (name in LOOKS and self.is_zero(args[0]))

    def _writes_none(self, node: fx.Node) -> bool:
        place, args = _WRITES[_name(node)], _args(node)
        return len(args) > place and self._picks_none(args[place])

    def _picks_none(self, where: Any) -> bool:
        """Whether indices have no elements, or a mask has no True ones."""
        return any(node in self.gone or self._is_mask(node) for node in _nodes(where))

    def _is_mask(self, node: Any) -> bool:
        """Whether it is a mask, or a view or a part of one."""
        while isinstance(node, fx.Node) and node not in self.masks and _looks_at_first(node):
            node = _args(node)[0]
        return node in self.masks


def _looks_at_first(node: fx.Node) -> bool:
    cuts = _name(node) == "getitem" and len(node.all_input_nodes) == 1 + isinstance(node.target, When)
    return (cuts or _name(node) in LOOKS) and bool(_args(node))


def _nodes(tree: Any) -> Iterator[fx.Node]:
    for leaf in tree if isinstance(tree, tuple | list) else (tree,):
        if isinstance(leaf, fx.Node):
            yield leaf


def _args(node: fx.Node) -> tuple[Any, ...]:
    """What a node computes with, without the condition of one that is called in one mode only."""
    return node.args[int(isinstance(node.target, When)) :]


def _name(node: fx.Node) -> str:
    target = function_of(node)
    return (target if isinstance(target, str) else getattr(target, "__name__", "")).strip("_")


_WRITES = {
    "setitem": 1, "index_put": 1, "masked_fill": 1, "masked_scatter": 1, "index_add": 2, "index_copy": 2,
    "index_fill": 2, "index_reduce": 2, "scatter": 2, "scatter_add": 2, "scatter_reduce": 2,
}  # fmt: skip
"""What writes to places of its first argument, by the position of the argument that says to which."""

_READS = frozenset({"getitem", "getattr", "size", "numel"})
_JOINS = frozenset({"cat", "concat", "concatenate"})
_MAKES = frozenset({"zeros", "zeros_like", "new_zeros"})
