"""What a model asks of its caller's settings: whether gradients, inference mode or autocast are on.

A recording is made in one setting, and its graph does in every other what the model has done in that one. So
whoever asks is noted, and the graph is compared with the model in the setting that was asked for.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import attention

from pdp_fx.errors import TraceError
from pdp_fx.tracing.replacing import entries, namespaces
from pdp_fx.tracing.shapes import check_step
from pdp_fx.tracing.source import is_ours, is_users, source_line

if TYPE_CHECKING:
    from pdp_fx.tracing.recorder import Recorder


class Setting(enum.Enum):
    """A setting other than the one that models are recorded in; the value says when it holds."""

    NO_GRADIENTS = "where gradients are off"
    INFERENCE = "in inference mode"
    AUTOCAST = "under autocast"

    def entered(self, device: str) -> Any:
        """A context in which the setting holds.

        Args:
            device: the type of the device that the model computes on.
        """
        if self is Setting.AUTOCAST:
            return torch.autocast(device, dtype=torch.bfloat16)
        return torch.no_grad() if self is Setting.NO_GRADIENTS else torch.inference_mode()


class SettingError(TraceError):
    """The graph does not do what the model does in another setting of its caller.

    Args:
        message: how they differ.
        setting: the setting.
        training: the mode in which they differ.
    """

    def __init__(self, message: str, setting: Setting, training: bool) -> None:
        super().__init__(message)
        self.setting, self.training = setting, training


_QUESTIONS = {
    "is_grad_enabled": Setting.NO_GRADIENTS,
    "is_inference_mode_enabled": Setting.INFERENCE,
    "is_autocast_enabled": Setting.AUTOCAST,
    "is_autocast_cpu_enabled": Setting.AUTOCAST,
}
"""Functions of torch, and what they ask about."""


@contextmanager
def noting_settings(recorder: Recorder) -> Generator[None, None, None]:
    """Note what the model asks about settings, by functions that it looks up in torch or has imported."""
    asked = {getattr(torch, name): setting for name, setting in _QUESTIONS.items()}
    noting = {question: _asked(recorder, question, setting) for question, setting in asked.items()}
    homes = (torch.__dict__, *namespaces(map(type, recorder.model.modules())))
    values = [
        (names, name, noting[value])
        for names in homes
        for name, value in names.items()
        if isinstance(value, BuiltinFunctionType) and value in noting
    ]
    with entries([*values, (attention.__dict__, _CHOOSES_KERNEL, _refused(recorder))]):
        yield


_CHOOSES_KERNEL = "_sdpa_kernel"
"""The function of `torch.nn.attention` by which `sdpa_kernel` sets which kernels may compute attention."""


def _refused(recorder: Recorder) -> Callable[..., None]:
    choose = getattr(attention, _CHOOSES_KERNEL)

    def chosen(*args: Any, **kwargs: Any) -> None:
        if not recorder.inside:
            recorder.refuse("chooses the kernel of attention by torch.nn.attention.sdpa_kernel")
        choose(*args, **kwargs)

    return chosen


def note_asked(recorder: Recorder, setting: Setting) -> bool:
    """Note that the model's own code asks about a setting; whether it is that who asks, and not torch."""
    frame = sys._getframe()
    while frame.f_back is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    users = is_users(frame.f_code.co_filename)
    if users:
        recorder.findings.asks[setting] = source_line()
        if setting is Setting.NO_GRADIENTS and recorder.findings.needs_gradients and recorder.model.training:
            _check_gradients(recorder)
    return users


NEEDS_GRADIENTS = "asks whether gradients are on, and this graph trains with gradients only"


def _check_gradients(recorder: Recorder) -> None:
    """Add a check that gradients are on, or off where they are now."""
    step = recorder.step("call_function", _ARE_ON, (), {})
    check = check_step([(step, _ARE_ON())], f"{source_line()} {NEEDS_GRADIENTS}", recorder.scope, "")
    recorder.steps += [step, check]


_ARE_ON = torch.is_grad_enabled


def _asked(recorder: Recorder, question: Callable[..., bool], setting: Setting) -> Callable[..., bool]:
    def answer(*args: Any) -> bool:
        users = not recorder.inside and note_asked(recorder, setting)
        told = users and setting is Setting.AUTOCAST and recorder.findings.as_if_cast
        return told or question(*args)

    return answer
