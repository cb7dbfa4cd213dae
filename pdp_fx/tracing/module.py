"""The graph module that a trace returns.

`fx.GraphModule` keeps only what its graph mentions, in the order of mention, and pickles by tracing its own
generated code again, which would freeze every flag and every random number it meets. `TracedModule` keeps the
model's whole tree of names, and pickles the graph itself.
"""

from collections.abc import Callable
from typing import Any, Self, TypeVar

from torch import fx, nn
from torch.fx.graph import PythonCode

from pdp_fx.standalone import restored_on_errors
from pdp_fx.tracing.blocks import gather_blocks, in_blocks
from pdp_fx.tracing.copying import copied
from pdp_fx.tracing.leaves import is_whole
from pdp_fx.tracing.objects import join_methods
from pdp_fx.tracing.recomputing import in_functions, recomputed_parts
from pdp_fx.tracing.restoring import changed_settings
from pdp_fx.tracing.serial import GraphText, graph_from_text, graph_to_text
from pdp_fx.tracing.shells import keep_state, shell_of
from pdp_fx.tracing.writer import CONSTANT

Model = TypeVar("Model", bound=nn.Module)

_TREE = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
_OWN = {"always_eval", *dir(fx.GraphModule(nn.Module(), fx.Graph()))}.difference(dir(nn.Module()))


class TracedModule(fx.GraphModule):
    """A graph module with all parameters, buffers and submodules of the model it was traced from."""

    def __init__(self, root: nn.Module, graph: fx.Graph, class_name: str = "GraphModule") -> None:
        super().__init__(nn.Module(), fx.Graph(), class_name)
        self.training = root.training
        for name in _TREE:
            mine, theirs = vars(self)[name], vars(root)[name]
            mine.clear()
            mine.update(theirs)
        self.always_eval: tuple[str, ...] = vars(root).get("always_eval", ())
        """Paths of modules that the model's own `train` keeps in eval mode."""
        keep_state(self, root)
        join_methods(self)
        self.graph = graph

    def get_submodule(self, target: str) -> nn.Module:
        """The module at a path, straight from the tables, for every pass asks for all of them.

        Raises:
            AttributeError: there is none.
        """
        found: nn.Module = self
        for name in target.split(".") if target else ():
            # The table of a scripted module is not a dict, and a path may not exist.
            table = found._modules
            part = table.get(name) if type(table) is dict else None
            if part is None:
                return super().get_submodule(target)
            found = part
        return found

    def __copy__(self) -> "TracedModule":
        """A graph module of its own, as by deepcopy, around the same parameters and buffers."""
        return copied(self, shares=True)

    def train(self, mode: bool = True) -> Self:
        """Set the mode, as the model's own `train` does."""
        super().train(mode)
        modules = dict(self.named_modules()) if self.always_eval else {}
        for path in self.always_eval:
            if path in modules:
                modules[path].training = False
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move or cast all tensors, but cast none that the model holds otherwise than in buffers."""
        constants = {name: tensor for name, tensor in self._buffers.items() if name.startswith(CONSTANT)}
        super()._apply(fn, recurse)
        for name, tensor in constants.items():
            moved = self._buffers[name]
            if tensor is not None and moved is not None and moved.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(moved.device)
        return self

    def recompile(self) -> PythonCode:
        """Generate the code of the graph.

        Parts that are recomputed in backward become functions, or else parts that not every run needs
        conditional, and an error in a block without gradients or with autocast restores what was before it.
        """
        parts = recomputed_parts(self.graph)
        blocks = [] if parts else gather_blocks(self.graph)
        spans = changed_settings(self.graph)
        if not blocks and not parts and not spans:
            return super().recompile()

        def rewritten(body: list[str]) -> list[str]:
            if parts:
                body = in_functions(self.graph, parts)(body)
            elif blocks:
                body = in_blocks(self.graph, blocks)(body)
            return restored_on_errors(body, spans)

        with self.graph.on_generate_code(lambda _: rewritten):
            return super().recompile()

    def _deepcopy_init(self) -> Callable[..., None]:
        return TracedModule.__init__

    def __reduce__(self) -> tuple[Any, ...]:
        state = {key: value for key, value in self.__getstate__().items() if key != "_graph"}
        return _restore, (type(self).__name__, state, graph_to_text(self.graph))


def in_double(model: Model) -> Model:
    """Cast all floating-point tensors of a model to float64, those too that the model would not cast."""
    nn.Module._apply(model, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    return model


def _restore(class_name: str, state: dict[str, Any], text: GraphText) -> TracedModule:
    root = nn.Module()
    root.__dict__.update(state)
    gm = TracedModule(root, graph_from_text(text), class_name)
    vars(gm).update({key: value for key, value in state.items() if key not in _TREE})
    return gm


def taken_name(model: nn.Module) -> str | None:
    """The name of a part of the model that a graph module has for itself, such as ``code``, or None."""
    names = (name for table in (model._modules, model._parameters, model._buffers) for name in table)
    return next((name for name in names if name in _OWN), None)


def always_eval(model: nn.Module) -> tuple[str, ...]:
    """The modules that `model.train()` leaves in eval mode; the caller puts the flags back."""
    model.train()
    return tuple(path for path, module in model.named_modules() if path and not module.training)


def mirror(model: nn.Module, opaque: frozenset[str] = frozenset()) -> nn.Module:
    """A tree with the model's names, parameters, buffers and leaves, whose inner modules are empty shells.

    Passes may add to or take from the shells without touching the user's model.

    Args:
        model: the model; not changed.
        opaque: paths of modules that are kept whole, besides the leaves.
    """
    shells: dict[int, nn.Module] = {}
    # Under all their names.
    wholes = {model.get_submodule(path) for path in opaque}

    def shell(module: nn.Module, path: str) -> nn.Module:
        if id(module) in shells:
            return shells[id(module)]
        if path and (module in wholes or is_whole(module)):
            return module
        made = shells[id(module)] = shell_of(module)
        made.training = module.training
        made._parameters.update(module._parameters)
        made._buffers.update(module._buffers)
        made._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            inner = f"{path}.{name}" if path else name
            made._modules[name] = None if child is None else shell(child, inner)
        return made

    return shell(model, "")
