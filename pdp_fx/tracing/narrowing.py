"""Finding the parts of a model because of which its graph is not exact, to keep them whole.

Most of what a graph cannot hold says so while it is recorded. What does not, such as code that sets an
attribute of a layer it is about to call, shows only in what the graph gives. Then the modules that the model
is made of are kept whole, all at first, and after that as few and as small ones as leave the graph exact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import nn

from pdp_fx.tracing.leaves import is_whole

Paths = frozenset[str]


def culprits(model: nn.Module, exact_without: Callable[[Paths], bool]) -> Paths:
    """The modules to keep whole; empty if the model's own ``forward`` is to blame.

    Modules of one class are kept whole together or not at all, so that the number of trials does not grow
    with how often a block is repeated.

    Args:
        model: the model.
        exact_without: whether the graph is exact if modules, by their paths, are kept whole.
    """
    kept = _parts(model, [""])
    if not kept or not exact_without(kept):
        return Paths()
    bottom = Paths()
    while kept != bottom:
        for alike in _by_class(model, kept - bottom):
            rest = kept - alike
            parts = _parts(model, alike)
            if rest and exact_without(rest):
                kept = rest
            elif parts and exact_without(rest | parts):
                kept = rest | parts
            else:
                bottom |= alike
    return kept


def _parts(model: nn.Module, paths: Iterable[str]) -> Paths:
    """The modules just below those at some paths that a recording looks into and that have a ``forward``."""
    canonical, found = {id(module): path for path, module in model.named_modules()}, set[str]()
    for path in paths:
        for child in model.get_submodule(path).children():
            inner = canonical[id(child)]
            if type(child).forward is nn.Module.forward or isinstance(child, nn.Sequential):
                found |= _parts(model, [inner])
            elif not is_whole(child):
                found.add(inner)
    return frozenset(found)


def _by_class(model: nn.Module, paths: Collection[str]) -> list[Paths]:
    """The paths of modules, those of each class together."""
    classes: dict[type, set[str]] = {}
    for path in sorted(paths):
        classes.setdefault(type(model.get_submodule(path)), set()).add(path)
    return [frozenset(alike) for alike in classes.values()]
