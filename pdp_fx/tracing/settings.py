"""What a model asks of its caller's settings: whether gradients, inference mode or autocast are on.

A recording is made in one setting, and its graph does in every other what the model has done in that one. So
whoever asks is noted, and the graph is compared with the model in the setting that was asked for. Which
parameters are trained, and whether inputs need gradients, are settings, too.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import attention

from pdp_fx.tracing.half import WidenedHalf
from pdp_fx.tracing.replacing import entries, wherever_named
from pdp_fx.tracing.shapes import check_step
from pdp_fx.tracing.sizes import live
from pdp_fx.tracing.source import asker, is_generated, is_users, source_line
from pdp_fx.tracing.steps import Attribute, Expr, InexactError, Value, is_input
from pdp_fx.tracing.structure import tensors

if TYPE_CHECKING:
    from pdp_fx.tracing.examples import ExampleCall
    from pdp_fx.tracing.recorder import Recorder


class Setting(enum.Enum):
    """A setting other than the one that models are recorded in; the value says when it holds."""

    NO_GRADIENTS = "where gradients are off"
    INFERENCE = "in inference mode"
    AUTOCAST = "under autocast"
    HALF = "under autocast to float16"
    CAST = "where autocast gives bfloat16"
    CAST_TO_HALF = "where autocast gives float16"
    FROZEN = "where parameters are trained that were not, or no longer are"
    OF_INPUTS = "where inputs need gradients that did not, or no longer do"
    FROM_LAYERS = "where inputs come from layers that are trained"

    @property
    def blame(self) -> str:
        """What is wrong with a line of a model that acts by it, and what to do, as a predicate."""
        if self in (Setting.CAST, Setting.CAST_TO_HALF):
            return "goes by a dtype that autocast changes: convert to the one that it needs, whatever it was"
        return "asks whether that is so: ask self.training or an argument instead"


CASTING = Setting.CAST, Setting.CAST_TO_HALF
"""Settings in which results have other dtypes than elsewhere."""


OF_TENSORS = Setting.FROZEN, Setting.OF_INPUTS, Setting.FROM_LAYERS
"""Settings of tensors, in which a model may stop gradients on their way and give the same."""


class Question(NamedTuple):
    """What a model asks.

    Attributes:
        setting: the setting that it asks for.
        parameter: the parameter of which it asks whether it is trained; empty if it asks for more than one,
            as by asking a result.
    """

    setting: Setting
    parameter: str = ""

    def answered(self, model: nn.Module, example: ExampleCall) -> Any:
        """A context in which the answer is another.

        Args:
            model: the model, whose parameters its graph shares.
            example: the call in the block.
        """
        given = list(tensors((example.args, example.kwargs)))
        if self.setting is Setting.FROZEN:
            everything = dict(model.named_parameters(remove_duplicate=False))
            return _turned([everything[self.parameter]] if self.parameter else everything.values())
        if self.setting is Setting.OF_INPUTS:
            return _turned(given)
        if self.setting is Setting.FROM_LAYERS:
            return _made_of_others(given)
        if self.setting in _AUTOCAST:
            device = next((tensor.device.type for tensor in given), "cpu")
            return _cast_to(_AUTOCAST[self.setting], device)
        return torch.no_grad() if self.setting is Setting.NO_GRADIENTS else torch.inference_mode()


_AUTOCAST = {
    Setting.AUTOCAST: torch.bfloat16,
    Setting.HALF: torch.float16,
    Setting.CAST: torch.bfloat16,
    Setting.CAST_TO_HALF: torch.float16,
}
"""The settings in which autocast is on, and its dtype."""


@contextmanager
def _cast_to(dtype: torch.dtype, device: str) -> Generator[None, None, None]:
    """Autocast to this dtype on a device."""
    with torch.autocast(device, dtype), WidenedHalf():
        yield


def _can_train(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be told that it needs gradients, and that it needs none."""
    return tensor.is_leaf and (tensor.is_floating_point() or tensor.is_complex())


@contextmanager
def _turned(leaves: Iterable[torch.Tensor]) -> Generator[None, None, None]:
    """Have those leaves need gradients in the block that need none outside, and the other way round."""
    turned = [leaf.requires_grad_(not leaf.requires_grad) for leaf in leaves if _can_train(leaf)]
    try:
        yield
    finally:
        for leaf in turned:
            leaf.requires_grad_(not leaf.requires_grad)


@contextmanager
def _made_of_others(leaves: Iterable[torch.Tensor]) -> Generator[None, None, None]:
    """Have those leaves be results in the block, of what needs gradients."""
    made = [leaf for leaf in leaves if _can_train(leaf)]
    for leaf in made:
        leaf.requires_grad_(False).mul_(torch.ones((), device=leaf.device, requires_grad=True))
    try:
        yield
    finally:
        for leaf in made:
            leaf.detach_()


class SettingError(InexactError):
    """The graph does not do what the model does in another setting of its caller.

    Args:
        model: as for `InexactError`.
        problem: as for `InexactError`.
        setting: the setting.
        training: the mode in which they differ.
    """

    def __init__(self, model: str, problem: str, setting: Setting, training: bool) -> None:
        super().__init__(model, problem)
        self.setting, self.training = setting, training

    @property
    def can_be_held(self) -> bool:
        """Whether the graph may insist on the setting that the model is traced in.

        Eval mode has to run without gradients, which is what it is for.
        """
        if self.setting is Setting.NO_GRADIENTS:
            return self.training
        return self.setting not in (Setting.INFERENCE, Setting.AUTOCAST)


_ASKING = {
    "is_grad_enabled": Setting.NO_GRADIENTS,
    "is_inference_mode_enabled": Setting.INFERENCE,
    "is_autocast_enabled": Setting.AUTOCAST,
    "is_autocast_cpu_enabled": Setting.AUTOCAST,
    "get_autocast_dtype": Setting.HALF,
    "get_autocast_cpu_dtype": Setting.HALF,
    "get_autocast_gpu_dtype": Setting.HALF,
}
"""Functions of torch, and what they ask about."""


@contextmanager
def noting_settings(recorder: Recorder) -> Generator[None, None, None]:
    """Note what the model asks about settings, by functions that it looks up in torch or has imported."""
    asking = [(getattr(torch, name), setting) for name, setting in _ASKING.items()]
    noting = [(function, _asked(recorder, function, setting)) for function, setting in asking]
    noting += [(seed, _seeded(recorder, seed)) for seed in (getattr(torch, name) for name in _SEEDING)]
    values = wherever_named(noting, map(type, recorder.model.modules()), torch.__dict__)
    with entries([*values, (attention.__dict__, _CHOOSES_KERNEL, _refused(recorder))]):
        yield


_SEEDING = ("manual_seed", "seed", "set_rng_state")
"""Functions of torch that set where its random numbers begin."""


def _seeded(recorder: Recorder, seed: Callable[..., Any]) -> Callable[..., Any]:
    def seeded(*args: Any, **kwargs: Any) -> Any:
        if not recorder.inside and is_users_question():
            recorder.refuse(f"seeds the random numbers of torch ({seed.__name__})")
        return seed(*args, **kwargs)

    return seeded


_CHOOSES_KERNEL = "_sdpa_kernel"
"""The function of `torch.nn.attention` by which `sdpa_kernel` sets which kernels may compute attention."""


def _refused(recorder: Recorder) -> Callable[..., None]:
    choose = getattr(attention, _CHOOSES_KERNEL)

    def chosen(*args: Any, **kwargs: Any) -> None:
        if not recorder.inside:
            recorder.refuse("chooses the kernel of attention by torch.nn.attention.sdpa_kernel")
        choose(*args, **kwargs)

    return chosen


def note_asked_tensor(recorder: Recorder, tensor: torch.Tensor, question: str) -> None:
    """Note that the model's own code asks whether a tensor needs gradients, or was made in inference mode.

    Args:
        recorder: the recording.
        tensor: the tensor.
        question: the name of what it asks, one of `functions.OF_GRADIENTS`.
    """
    if not is_users_question():
        return
    value, asks, source = recorder.origins.known(tensor), recorder.findings.asks, source_line()
    if question == "is_inference":
        settings, what = [Setting.INFERENCE], ""
    elif isinstance(value, Attribute) and isinstance(tensor, nn.Parameter):
        settings, what = [Setting.FROZEN], value.path
        if sum(bool(question.parameter) for question in asks) < MOST_ALONE:
            asks[Question(Setting.FROZEN, value.path)] = source
    elif is_input(value):
        settings, what = [Setting.OF_INPUTS], "an input"
        if question != "requires_grad":
            settings.append(Setting.FROM_LAYERS)
    else:
        settings, what = [Setting.NO_GRADIENTS, Setting.FROZEN, Setting.OF_INPUTS], "a result"
    asks |= {Question(setting): source for setting in settings}
    held = value is not None and not recorder.findings.holds.isdisjoint(settings)
    if held and (recorder.model.training or Setting.NO_GRADIENTS not in settings):
        needs = Expr(getattr, (value, "requires_grad"))
        hold(recorder, needs, tensor.requires_grad, f"whether {what} needs gradients")
        if Setting.FROM_LAYERS in settings:
            hold(recorder, Expr(getattr, (value, "is_leaf")), tensor.is_leaf, f"whether {what} is a leaf")


MOST_ALONE = 8
"""Of so many parameters a model may ask whether they are trained, and each is tried alone."""

HELD = "and that has to be so as it was when the model was traced"


def hold(recorder: Recorder, value: Value, answer: object, what: str) -> None:
    """Add a check that the answer to a question is what it is now.

    Args:
        recorder: the recording.
        value: the answer in the graph.
        answer: what it is now.
        what: the question, as the end of a sentence that begins with the line that asks.
    """
    message = f"{source_line()} asks {what}, {HELD}"
    recorder.steps.append(check_step([(value, answer)], message, recorder.scope, ""))


def hold_call(
    recorder: Recorder, function: Callable[..., Any], args: tuple[Any, ...], answer: object, what: str
) -> None:
    """The same for a question that is a call, which the graph repeats here."""
    step = recorder.step("call_function", function, args, {})
    recorder.steps.append(step)
    hold(recorder, step, answer, what)


def is_users_question() -> bool:
    """Whether the model's own code calls what asks this, and not torch."""
    return is_users(asker().f_code.co_filename)


def _restores(frame: FrameType) -> bool:
    """Whether the code of a graph asks whether gradients are on to restore that, in both modes of a model."""
    sets = [name for name in frame.f_code.co_names if name.endswith("_set_grad_enabled")]
    return is_generated(frame) and sets == ["_set_grad_enabled"]


def _asked(recorder: Recorder, function: Callable[..., Any], setting: Setting) -> Callable[..., Any]:
    def answer(*args: Any) -> Any:
        result = function(*args)
        if recorder.inside or not is_users_question():
            return result
        if setting is Setting.NO_GRADIENTS and _restores(sys._getframe(1)):
            step = recorder.step("call_function", function, (), {})
            recorder.steps.append(step)
            return live(int(result), step, recorder.session)
        findings = recorder.findings
        findings.asks[Question(setting)] = source_line()
        if setting in findings.holds and (recorder.model.training or setting is not Setting.NO_GRADIENTS):
            hold_call(recorder, function, args, result, _HELD[setting])
        return True if setting is Setting.AUTOCAST and findings.as_if_cast else result

    return answer


_HELD = {Setting.NO_GRADIENTS: "whether gradients are on", Setting.HALF: "for the dtype of autocast"}
"""What the functions of torch ask whose answers can be held."""
