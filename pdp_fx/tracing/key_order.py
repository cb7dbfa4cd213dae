"""Dicts among the inputs: a model may go by the order of their keys, as by ``torch.cat(list(d.values()))``.

No function sees that a dict is walked, so the model is run with the keys the other way round. So it is with
keyword arguments that it takes as ``**kwargs``, whose order a graph cannot hold it to.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, UserDict
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


def goes_by_keywords(gm: fx.GraphModule, model: nn.Module, example: ExampleCall) -> bool:
    """Whether the model goes by the order of the keyword arguments that it takes as ``**kwargs``."""
    if len(example.kwargs) < 2:
        return False
    parameters = inspect.signature(model.forward).parameters.values()
    named = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
    others = [name for name in example.kwargs if name not in named]
    if len(named) == len(parameters) or len(others) < 2:
        return False
    turned = ExampleCall(
        example.args,
        {name: example.kwargs[name] for name in (*named, *reversed(others)) if name in example.kwargs},
    )
    return any(difference(gm, model, turned, training, runner=_in_one_order) for training in MODES)


def _in_one_order(model: Any, call: ExampleCall) -> Any:
    """The result of a call, with the keys of all dicts in one order."""
    return _ordered(called(model, call), lambda items: sorted(items, key=lambda item: str(item[0])))


def _ordered(value: Any, order: Callable[[_Items], Iterable[tuple[Any, Any]]]) -> Any:
    """A structure with the items of each dict in another order."""
    if isinstance(value, dict | UserDict):
        items = [(key, _ordered(item, order)) for key, item in cast(Any, value).items()]
        try:
            made = copy.copy(cast(Any, value))
        except Exception:  # noqa: BLE001 a class of the user's may refuse to be copied
            return value
        _fill(made.data if isinstance(made, UserDict) else made, order(items))
        return made
    if type(value) in (list, tuple):
        return cast(type[Any], type(value))(_ordered(item, order) for item in value)
    return value


def _fill(given: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> None:
    """Give a dict these items, also one that lets none be taken out, as a ModelOutput does."""
    kind: Any = OrderedDict if isinstance(given, OrderedDict) else dict
    kind.clear(given)
    for key, item in items:
        kind.__setitem__(given, key, item)
