"""Whether numbers are numbers, in one pass over them."""

from torch import Tensor


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite.

    One of them makes the sum NaN or infinite, too. A sum may also overflow by itself, so only one that does
    not is an answer; it costs a fraction of `torch.isfinite`, which writes several tensors of this size.

    Args:
        tensor: any shape and any dtype.
    """
    tensor = tensor.detach()
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
