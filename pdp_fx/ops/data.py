"""`Tensor.data` as a function of a graph."""

import torch
from torch import Tensor


def data_of(tensor: Tensor) -> Tensor:
    """Return `tensor.data`: its memory without its history, any shape.

    What is written to it is unseen by autograd, which else refuses to compute gradients with what a later
    step has changed. Where gradients are off that makes no difference, and operations are watched there.
    """
    return tensor.data if torch.is_grad_enabled() else tensor.detach()
