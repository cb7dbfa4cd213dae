"""Channels that are spread over several axes.

A view can spread one axis of channels over two, (heads * dimensions) to (heads, dimensions). What stays must
then be a rectangle: all kept indices of one axis with all kept indices of the other. Labels are tied, before
channels are ranked, until that holds for every choice of dropped classes.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from pdp_fx.channels.labels import Ties


def make_rectangular(grids: list[Tensor], ties: Ties) -> np.ndarray:
    """Tie labels so that every grid stays rectangular, and return the class of every label.

    Labels stay separate only along the longest axis of a grid; along the others they are tied. Grids are
    handled one by one in graph order, so that a transposed grid follows the first. Later ties cannot spoil a
    grid that is rectangular.

    Args:
        grids: labels of tensors that change along two axes or more.
        ties: where new ties are added.
    """
    classes = ties.classes()
    for grid in grids:
        if not is_rectangular(classes[grid.numpy()]):
            longest = max(range(grid.ndim), key=lambda axis: grid.shape[axis])
            flat = grid.movedim(longest, 0).reshape(grid.shape[longest], -1)
            ties.bind(flat, flat[:, :1])
            classes = ties.classes()
    return classes


def is_rectangular(grid: np.ndarray) -> bool:
    """Whether the classes change along one axis only."""
    return sum(bool((grid != np.take(grid, [0], axis)).any()) for axis in range(grid.ndim)) <= 1
