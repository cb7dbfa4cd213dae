"""Parameters that are spread over several processes (FSDP2's `fully_shard`, tensor parallelism)."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from pdp_fx.errors import StateError


def is_shard(tensor: Tensor) -> bool:
    """Whether this process holds a part of `tensor` only."""
    # Importing the module takes a second; where it was never imported there is no such tensor.
    loaded: Any = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def whole(tensor: Any) -> Tensor:
    """All of `tensor`, gathered from the processes it is spread over; each of them must call this."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def refuse_sharded(model: nn.Module) -> None:
    """Refuse to convert a model of which this process holds a part only."""
    for name, parameter in model.named_parameters():
        if is_shard(parameter):
            raise StateError(
                f"{name} is sharded over several processes; gather the state dict (get_model_state_dict of "
                "torch.distributed.checkpoint with full_state_dict=True), load it into a prepared model that "
                "is not sharded, and convert that one"
            )


def refuse_shard(weight: Tensor) -> None:
    """Refuse to rank a part of a weight as if it were the whole."""
    if not torch.compiler.is_compiling() and is_shard(weight):
        raise StateError(
            "a mask got a weight that is still sharded; call fully_shard on the prepared model itself: its "
            "graph runs as one module, so a block of it that is sharded on its own is never gathered"
        )
