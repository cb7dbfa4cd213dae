"""Tensors that are split along an axis into a number of parts that follows from sizes."""

import operator
from collections.abc import Iterable
from typing import Any

from pdp_fx.tracing.objects import Build, Fill
from pdp_fx.tracing.steps import Expr, How, Step, parts_of


class Parts:
    """What a model does with the parts that `unbind`, `split` and `chunk` return.

    A list of all parts, as in ``torch.cat(list(x))``, is passed on or returned as a whole, so that the graph
    works for any number of them. If nothing else is done with the parts, the check of their number may be
    unnecessary.
    """

    def __init__(self) -> None:
        self._given: dict[Step, tuple[int, Step]] = {}
        self._joined: set[Step] = set()

    def fell(self, step: Step, count: int, check: Step) -> None:
        """Note a step that returned ``count`` parts, and the step that checks their number."""
        self._given[step] = count, check

    def joined(self, value: Any) -> Any:
        """The step itself for a list of all its parts in order; any other value unchanged."""
        first = value[0] if isinstance(value, list | tuple) and value else None
        made = first.args[0] if isinstance(first, Expr) and first.call is operator.getitem else None
        if not isinstance(made, Step) or self._given.get(made, (0,))[0] != len(value):
            return value
        if any(not _is_part(part, made, index) for index, part in enumerate(value)):
            return value
        self._joined.add(made)
        return made

    def returned(self, tree: Any) -> Any:
        """What the model returns, encoded, with whole lists of parts in the place of the parts one by one."""
        if isinstance(tree, Expr) and isinstance(tree.call, type | Build | Fill):
            return Expr(tree.call, tuple(map(self.returned, tree.args)), self.returned(tree.kwargs))
        if isinstance(tree, dict):
            return {key: self.returned(part) for key, part in tree.items()}
        if not isinstance(tree, tuple | list):
            return tree
        made = self.joined(tree)
        if made is tree:
            return type(tree)(map(self.returned, tree))
        return Expr(type(tree), (made,))

    def settle(self, steps: Iterable[Step], output: Any) -> bool:
        """Mark the checks of numbers of parts that can be removed if another example shows them unnecessary.

        Those are the checks of steps whose parts are only used as whole lists.

        Returns:
            Whether there is such a check.
        """
        alone = self._joined - {
            made for step in steps for made in _taken_apart((step.args, step.kwargs, step.changes))
        }
        alone -= _taken_apart(output)
        for step in alone:
            self._given[step][1].decides = How.COMPARED
        return bool(alone)


def _is_part(value: Any, made: Step, index: int) -> bool:
    return isinstance(value, Expr) and value.call is operator.getitem and value.args == (made, index)


def _taken_apart(tree: Any) -> set[Step]:
    """The steps of which single parts are used."""
    items = (part for part in parts_of(tree) if isinstance(part, Expr) and part.call is operator.getitem)
    return {item.args[0] for item in items if isinstance(item.args[0], Step)}
