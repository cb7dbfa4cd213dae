"""Parameters that are spread over several processes (FSDP2's `fully_shard`, tensor parallelism)."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pdp_fx.errors import StateError


def is_shard(tensor: Tensor) -> bool:
    """Whether this process holds a part of `tensor` only."""
    # Importing the module takes a second; where it was never imported there is no such tensor.
    loaded: Any = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def reshard(model: nn.Module) -> None:
    """Put the shards in the place of what FSDP2 has gathered, and keeps after an evaluation.

    What is gathered may be in another dtype than the shards, and what is written to it does not reach them.
    """
    loaded: Any = sys.modules.get("torch.distributed.fsdp")
    if loaded is None:
        return
    for module in model.modules():
        if isinstance(module, loaded.FSDPModule):
            sharded: Any = module
            sharded.reshard()


def whole(tensor: Any) -> Tensor:
    """All of `tensor`, gathered from the processes it is spread over; each of them must call this."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def write_whole(shard: Tensor, full: Tensor) -> None:
    """Write ``full``, all of the tensor that ``shard`` is a part of, to it; each process has to call this."""
    loaded: Any = sys.modules["torch.distributed.tensor"]
    part: Any = shard
    with torch.no_grad():
        spread = loaded.distribute_tensor(full, part.device_mesh, part.placements, src_data_rank=None)
        part.copy_(spread)


@contextmanager
def gathered(
    *modules: nn.Module, write: bool = False, with_gradients: bool = False
) -> Generator[None, None, None]:
    """Put gathered parameters in the place of the sharded ones of some modules.

    Args:
        modules: the modules; each process must enter this context.
        write: whether what was written to the gathered ones is kept.
        with_gradients: whether gradients of the gathered ones reach the sharded ones.
    """
    swapped = [
        (module, name, parameter)
        for owner in modules
        for module in owner.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if is_shard(parameter)
    ]
    try:
        for module, name, parameter in swapped:
            if with_gradients:
                module._parameters[name] = cast(nn.Parameter, whole(parameter))
            else:
                module._parameters[name] = nn.Parameter(whole(parameter.detach()), parameter.requires_grad)
        yield
        for module, name, parameter in swapped if write else ():
            write_whole(parameter, module.get_parameter(name).detach())
    finally:
        for module, name, parameter in swapped:
            module._parameters[name] = parameter


def is_made_of_others(tensor: Tensor) -> bool:
    """Whether `tensor` stands for numbers that it stores as other tensors, as quantised weights do."""
    return is_traceable_wrapper_subclass(tensor) and not is_shard(tensor)


def _first_that(model: nn.Module, fits: Callable[[Tensor], bool]) -> str | None:
    """The name of the first parameter that fits, or None."""
    return next((name for name, parameter in model.named_parameters() if fits(parameter)), None)


def refuse_divided(model: nn.Module) -> None:
    """Refuse to prepare a model whose parameters are parts of tensors, or are made of other tensors."""
    if name := _first_that(model, is_shard):
        raise StateError(
            f"{name} is sharded over several processes, and weights are ranked as a whole; prepare the "
            "model first, and call fully_shard on what prepare returns (tensor parallelism of single "
            "layers is not supported)"
        )
    if name := _first_that(model, is_made_of_others):
        raise StateError(
            f"{name} is of type {type(model.get_parameter(name)).__name__}, as quantised weights are, and "
            "cannot be trained with masks; prepare the model in floating point, and quantise what convert "
            "returns"
        )


def refuse_sharded(model: nn.Module) -> None:
    """Refuse to convert a model of which this process holds a part only."""
    if name := _first_that(model, is_shard):
        raise StateError(
            f"{name} is sharded over several processes; gather the state dict (get_model_state_dict of "
            "torch.distributed.checkpoint with full_state_dict=True), load it into a prepared model that "
            "is not sharded, and convert that one"
        )


def refuse_not_whole(weight: Tensor | fx.Proxy) -> None:
    """Refuse to rank a part of a weight as if it were the whole, and what stands for one in `fx`."""
    if torch.compiler.is_compiling():
        return
    if isinstance(weight, fx.Proxy):
        raise StateError(
            "a prepared model cannot be traced symbolically again, as create_feature_extractor does it, too: "
            "do that to the model before prepare, or to what convert returns"
        )
    if is_shard(weight):
        raise StateError(
            "a mask got a weight that is still sharded; call fully_shard on the prepared model itself: its "
            "graph runs as one module, so a block of it that is sharded on its own is never gathered"
        )
