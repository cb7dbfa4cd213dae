"""Which tensors in a storage share elements of it with another one."""

import torch
from torch import Tensor


def overlapping(written: Tensor, others: list[Tensor]) -> list[Tensor]:
    """Those of ``others`` that writing to ``written`` may change; all are strided and in one storage."""
    if not others:
        return []
    size = written.untyped_storage().nbytes() // written.element_size()
    touched = torch.zeros(size, dtype=torch.bool)
    touched.as_strided(written.shape, written.stride(), written.storage_offset()).fill_(True)
    return [
        other
        for other in others
        if other.element_size() != written.element_size()
        or bool(touched.as_strided(other.shape, other.stride(), other.storage_offset()).any())
    ]
