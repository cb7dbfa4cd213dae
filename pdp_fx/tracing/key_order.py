"""Dicts among the inputs: a model may go by the order of their keys, as by ``torch.cat(list(d.values()))``.

No function sees that a dict is walked, so the model is run with the keys the other way round.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import fx, nn

from pdp_fx.tracing.exact import MODES
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.verify import called, difference

_Items = list[tuple[Any, Any]]


def goes_by_order(gm: fx.GraphModule, model: nn.Module, example: ExampleCall) -> bool:
    """Whether the model does something else where keys come in another order, and its graph does not.

    The order in which the keys of a result come is of no account.
    """
    walked: list[int] = []

    def backwards(items: _Items) -> Iterable[tuple[Any, Any]]:
        walked.append(len(items))
        return reversed(items)

    kwargs = {name: _ordered(given, backwards) for name, given in example.kwargs.items()}
    turned = ExampleCall(_ordered(example.args, backwards), kwargs)
    return any(length > 1 for length in walked) and any(
        difference(gm, model, turned, training, runner=_in_one_order) for training in MODES
    )


def _in_one_order(model: Any, call: ExampleCall) -> Any:
    """The result of a call, with the keys of all dicts in one order."""
    return _ordered(called(model, call), lambda items: sorted(items, key=lambda item: str(item[0])))


def _ordered(value: Any, order: Callable[[_Items], Iterable[tuple[Any, Any]]]) -> Any:
    """A structure with the items of each dict in another order."""
    if type(value) in (dict, OrderedDict):
        items = [(key, _ordered(item, order)) for key, item in value.items()]
        return cast(type[Any], type(value))(order(items))
    if type(value) in (list, tuple):
        return cast(type[Any], type(value))(_ordered(item, order) for item in value)
    return value
