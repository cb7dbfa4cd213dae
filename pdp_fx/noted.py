"""What `prepare` notes of a model's layers, to tell later whether one was replaced, tied or untied since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from torch import fx, nn

from pdp_fx.errors import StateError
from pdp_fx.ops.kinds import kind_of, named_modules, owned_names
from pdp_fx.planning import parameter_of
from pdp_fx.sharding import is_made_of_others
from pdp_fx.tracing.leaves import has_own_forward


@dataclass(frozen=True)
class Noted:
    """Layers and parameters as they were.

    Attributes:
        layers: the types of the layers that take their masked parameters as arguments, or hold channels that
            are pruned, by name.
        shapes: the shapes of the parameters that masks read, by name.
        owners: for every name of a parameter the first of its names.
    """

    layers: Mapping[str, type[nn.Module]] = field(default_factory=dict[str, type[nn.Module]])
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    owners: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, gm: fx.GraphModule, read: Iterable[str], pruned: Iterable[str]) -> Self:
        """What there is to note of a prepared model.

        Args:
            gm: the prepared model.
            read: the names of the parameters that masks read.
            pruned: the names of the tensors that hold channels which are pruned.
        """
        holders = {name.rpartition(".")[0] for name in pruned}
        modules = [(name, module, kind_of(module)) for name, module in named_modules(gm)]
        layers = {
            name: type(module)
            for name, module, kind in modules
            if kind and (type(module) is kind.explicit or name in holders)
        }
        shapes = {name: tuple(parameter_of(gm, name).shape) for name in read}
        return cls(layers, shapes, _owners(gm))

    def check(self, gm: fx.GraphModule, computed: Mapping[str, str]) -> None:
        """Raise StateError if a masked layer is no longer what `prepare` has put there, or ties differ.

        Args:
            gm: the prepared model.
            computed: the parameters in whose place computed weights are pruned (`Pruner.computed`).
        """
        now = dict(named_modules(gm))
        for name, kind in self.layers.items():
            layer = now.get(name)
            if layer is None or not _is_still(layer, kind) or has_own_forward(layer):
                raise StateError(
                    f"{name} was replaced, wrapped or given another forward after prepare, so it is not "
                    "masked as planned; change layers before prepare"
                )
        for name in self.shapes:
            if name not in computed and is_made_of_others(parameter := parameter_of(gm, name)):
                raise StateError(
                    f"{name} has become of type {type(parameter).__name__} after prepare, as quantised "
                    "weights are, and cannot be pruned; quantise what convert returns"
                )
        self.check_tied(gm)
        owners = _owners(gm)
        for name, owner in self.owners.items():
            other = owners.get(name, owner)
            if owner == name and other != owner:
                raise StateError(
                    f"{name} has become one parameter with {other} after prepare; tie them before it"
                )

    def check_tied(self, gm: fx.GraphModule) -> None:
        """Raise StateError if names that stood for one parameter stand for two now."""
        for name, owner in self.owners.items():
            if name != owner and _parameter(gm, name) is not _parameter(gm, owner):
                raise StateError(
                    f"{name} and {owner} were one parameter when the model was prepared and are two now, of "
                    f"which only {owner} is read; tie them again, or prepare the model with two"
                )


def _is_still(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer is of this type, or of the one that takes the parameters of this type as arguments."""
    now = kind_of(layer)
    return type(layer) is kind or (now is not None and (now.plain, now.explicit) == (kind, type(layer)))


def _owners(gm: fx.GraphModule) -> dict[str, str]:
    """For every name of a parameter the first of its names."""
    first = owned_names(gm)
    return {name: first[id(parameter)] for name, parameter in gm.named_parameters(remove_duplicate=False)}


def _parameter(gm: fx.GraphModule, name: str) -> nn.Parameter | None:
    try:
        return gm.get_parameter(name)
    except AttributeError:
        return None
