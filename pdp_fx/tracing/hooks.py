"""Hooks that a graph does not call, or calls without what else the model does with their results."""

import warnings
from collections.abc import Iterator

from torch import fx, nn

from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.forgetting import forgetting, in_mode
from pdp_fx.tracing.held import CONTAINERS
from pdp_fx.tracing.leaves import is_layer
from pdp_fx.tracing.shells import is_shell
from pdp_fx.tracing.verify import called


def warn_of_hooks(gm: fx.GraphModule, model: nn.Module, example: ExampleCall) -> None:
    """Warn of hooks that are not called any more, and of those that fill what the model empties.

    Args:
        gm: the graph of the model.
        model: the model.
        example: what it was traced on.
    """
    for path, module in model.named_modules():
        # Hooks before a layer of torch are what computes its weights, so that they are looked into.
        before = () if is_layer(module) else module._forward_pre_hooks.values()
        if any((before, module._forward_hooks)) and (module is model or is_shell(gm.get_submodule(path))):
            warnings.warn(
                f"the hooks of {path or 'the model'} are not called any more: what they compute is in the "
                "graph, and what else they do, such as storing results, is not. Register those with a layer",
                stacklevel=5,
            )
    hooked = [path for path, layer in gm.named_modules() if not is_shell(layer) and layer._forward_hooks]
    for name in _filled(gm, model, example) if hooked else ():
        warnings.warn(
            f"the hooks of {', '.join(hooked)} fill {name}, which the code of the model empties. The graph "
            "calls these hooks only: empty it after each call, or return what they collect",
            stacklevel=5,
        )


def _filled(gm: fx.GraphModule, model: nn.Module, example: ExampleCall) -> Iterator[str]:
    """The containers that modules hold in which two calls of the graph leave more than those of the model."""

    def after(which: nn.Module) -> dict[str, int]:
        def work() -> dict[str, int]:
            for _ in range(2):
                called(in_mode(which, training=False), example.fresh())
            return _lengths(model)

        return forgetting(work, model, which)

    left, filled = after(model), after(gm)
    yield from (name for name, length in filled.items() if length > left.get(name, 0))


def _lengths(model: nn.Module) -> dict[str, int]:
    return {
        f"{path}.{name}" if path else name: len(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, CONTAINERS)
    }
