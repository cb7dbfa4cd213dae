"""Whether tensors that share a storage share any of its elements."""

import torch
from torch import Tensor


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether writing to one tensor may change the other.

    Args:
        one: any strided tensor.
        other: another one in the same storage.
    """
    if one.element_size() != other.element_size():
        return True
    touched = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    touched.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(touched.as_strided(other.shape, other.stride(), other.storage_offset()).any())
