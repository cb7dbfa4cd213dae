"""Finding state that a model keeps between calls outside its buffers: counters, states, temperatures.

A graph can keep state in parameters and buffers only. A module that changes its own attributes and acts by
them in its next call is kept whole; if the model's own forward does so, the model is refused.
"""

import logging
from collections.abc import Iterable
from itertools import product
from typing import Any

import torch
from torch import nn

from pdp_fx.errors import TraceError
from pdp_fx.tracing.attempts import recorded_again
from pdp_fx.tracing.decoys import does_same
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.findings import Findings
from pdp_fx.tracing.forgetting import in_mode
from pdp_fx.tracing.preserve import Changes, anything_may_be_written
from pdp_fx.tracing.steps import Whole
from pdp_fx.tracing.verify import Runner, again, called, difference

_log = logging.getLogger(__name__)


def remembering(
    gm: nn.Module, model: nn.Module, example: ExampleCall, changes: Changes, findings: Findings
) -> dict[Whole, str]:
    """The modules to keep whole because the model acts by what it has kept, with the reasons.

    Args:
        gm: the graph of the model.
        model: the model.
        example: what it was traced on.
        changes: the attributes that runs of the model have changed.
        findings: what is known of the model, with the parts that are kept whole for this reason already.

    Raises:
        TraceError: the model's own forward does so.
    """
    modes = product((False, True), repeat=2)
    if not changes or (
        all(_act_alike(gm, model, example, later, first) for later, first in modes)
        and all(_acts_as_recorded(gm, model, example, training, findings) for training in (False, True))
    ):
        return {}
    kept = [(path, module) for path, module in model.named_modules() if module in changes]
    # Or who holds such a module has changed it.
    holders = [(path.rpartition(".")[0], module) for path, module in kept]
    for places in (kept, holders):
        found = {
            Whole(path): f"keeps {_listed(changes[module])} for its next call, outside its buffers"
            for path, module in places
            if path and Whole(path) not in findings.lasting
        }
        if found:
            return found
    names = _listed(changes.get(model) or [name for names in changes.values() for name in names])
    raise TraceError(
        f"cannot trace the forward of {type(model).__name__} itself: it keeps {names} for its next call, "
        "outside its buffers; keep it in a buffer, or move that part into a submodule of its own, which then "
        "stays opaque"
    )


def _act_alike(gm: nn.Module, model: nn.Module, example: ExampleCall, training: bool, trains: bool) -> bool:
    """Whether a second and a third call of the graph give what those of the model give.

    They are on other batches than the first, and on other sizes, which may be all that changes the state.

    Args:
        gm: the graph.
        model: the model.
        example: what both are called on.
        training: the mode of these calls.
        trains: the mode of the first.
    """

    def differ(others: Iterable[ExampleCall]) -> bool | None:
        for other in others:
            # What is kept of the smaller call may limit the larger one.
            calls = ((other, example), (example, other))[: 1 if other is example else 2]
            runs = ((later, again(first, trains)) for first, later in calls)
            found = [difference(gm, model, later, training, runner=runner) for later, runner in runs]
            if any(each is not None for each in found):
                return any(found)
        return None

    sizes = () if example.has_places_elsewhere else sorted(example.sizes())
    return differ((*example.others(), example)) is False and not any(
        differ(example.resized(size)) for size in sizes
    )


def _acts_as_recorded(
    gm: nn.Module, model: nn.Module, example: ExampleCall, training: bool, findings: Findings
) -> bool:
    """Whether a second call of the model does the same steps, or gives what the graph gives on other numbers.

    On the example's numbers a step that is another one may make no difference, as where 0 is what its result
    is multiplied by. Nor may one that is left out because its result is kept, unless weights have changed.
    """
    try:
        runs = (None, example)
        once, twice = (
            recorded_again(model, example, training, findings.aside(), first=first) for first in runs
        )
        if does_same(once, twice):
            return True
    except Exception as err:  # noqa: BLE001 the model need not bear to be recorded then
        _log.info("a second call is not recorded: %s", err)
    others = example.with_other_numbers()
    runs = ((other, again(other, training)) for other in others)
    if any(difference(gm, model, other, training, runner=runner) for other, runner in runs):
        return False
    with anything_may_be_written():
        return not difference(gm, model, example, training, runner=_with_other_weights(model))


def _with_other_weights(owner: nn.Module) -> Runner:
    """A runner that calls a model twice, the second time with other numbers in the parameters of the owner.

    They change in training, so the model goes through that, where some drop what they keep for evaluation. A
    buffer that training leaves alone, such as the frequencies of rotary positions, may be kept as anything.
    """

    def call(model: Any, example: ExampleCall) -> Any:
        training = model.training
        called(model, example.fresh())
        with torch.no_grad():
            for weight in owner.parameters():
                if weight.is_floating_point():
                    # Not all by one factor, which a norm would take back.
                    shares = torch.linspace(
                        0.5, 1.0, weight.numel(), dtype=weight.dtype, device=weight.device
                    )
                    weight.mul_(shares.view(weight.shape))
        return called(in_mode(model, training), example)

    return call


def _listed(names: list[str]) -> str:
    return ", ".join(names)
