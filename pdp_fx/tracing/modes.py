"""Steps that happen only in one mode."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import has_side_effect


@dataclass(frozen=True)
class When:
    """A function that is called only if its first argument is true, and otherwise gives None.

    A graph has no branches: a step that draws random numbers or updates a buffer in training only is a call
    of `When(function)` on the training flag and the arguments.
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        has_side_effect(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return When, (self.function,)

    @property
    def __name__(self) -> str:
        return f"when_{self.function.__name__.strip('_')}"

    def __call__(self, condition: bool, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs) if condition else None
