"""Proving by comparison that masks change nothing at first, and that converting changes nothing at all.

The comparison is in the model's dtype first. If rounding may explain a difference, a copy in float64 decides.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, fx, nn

from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.channels.elsewhere import widths_of
from pdp_fx.compiler import Context, OnPass, Pipeline
from pdp_fx.errors import PdpError, StateError, VerifyError
from pdp_fx.example_inputs import matching
from pdp_fx.fingerprint import fingerprint
from pdp_fx.measuring import Precision, eval_outputs, relative_difference, rounding_effect
from pdp_fx.passes.verify_equivalence import Converted, Reference
from pdp_fx.pruner import CHILD, Pruner
from pdp_fx.tracing.copying import copied
from pdp_fx.tracing.examples import ExampleCall, Inputs, first_taken
from pdp_fx.tracing.modes import asks_mode
from pdp_fx.tracing.module import in_double
from pdp_fx.tracing.outcome import Outcome
from pdp_fx.tracing.verify import run, tried

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
"""The difference, relative to the output's scale, that is allowed at first."""

LOOSE = 1e-4
LOOSE_ROUNDINGS = 16
"""The difference allowed if float64 decides or cannot be used: so many roundings, at least `LOOSE`."""

AMPLIFIED = 10
"""How many times the effect of one rounding of every product a converted model may differ in float64."""

MOST_AMPLIFIED = 1e-6
"""The limit of that: a model that amplifies rounding further cannot be told from one with a wrong index."""


def check_unpruned(
    gm: fx.GraphModule, model: nn.Module, unmasked: Outcome | None, example: ExampleCall
) -> None:
    """Check that masks change nothing before anything is pruned, up to rounding.

    Training mode is looked at if the graph has steps for it, such as writes to weights, which masks might
    read too early. What rounding moves further than it may is compared in float64.

    Args:
        gm: the prepared model.
        model: the user's, whose state is restored.
        unmasked: the outcome of the graph in eval mode before masks were inserted; None if it is not known.
        example: the call that it is the outcome of.

    Raises:
        VerifyError: the outputs differ, or the prepared model fails.
    """
    if unmasked is not None and not unmasked.is_near(_masked(gm, model, example, False)):
        _check_in_double(gm, model, example, False, "")
    if any(map(asks_mode, gm.graph.nodes)):
        trained = tried(model, example, True)
        if isinstance(trained, Outcome) and not trained.is_near(_masked(gm, model, example, True)):
            _check_in_double(gm, model, example, True, " in training mode")


def _check_in_double(
    gm: fx.GraphModule, model: nn.Module, example: ExampleCall, training: bool, where: str
) -> None:
    """Check that only rounding which the model amplifies makes the masked model differ.

    Raises:
        VerifyError: it differs in float64 by more than that, or cannot be compared there.
    """
    differs = VerifyError(f"the masked model differs from yours{where} before anything is pruned. {_OURS}")
    try:
        pair = in_double(copied(nn.ModuleList([gm, model])))
    except StateError as err:
        raise differs from err
    mine, theirs = cast(fx.GraphModule, pair[0]), pair[1]
    call = example.cast(torch.float64)
    wanted, got = tried(theirs, call, training), tried(mine, call, training)
    if not isinstance(wanted, Outcome) or not isinstance(got, Outcome):
        raise differs
    if not wanted.is_near(got):
        allowed = allowed_for(rounding_effect(mine, (call.args, dict(call.kwargs))))
        if not wanted.is_near(got, allowed):
            raise differs


def _masked(gm: fx.GraphModule, model: nn.Module, example: ExampleCall, training: bool) -> Outcome:
    try:
        return run(gm, example, training, None, model)
    except Exception as err:
        raise VerifyError(f"the masked model fails: {type(err).__name__}: {err}. {_OURS}") from err


FEW_WIDTHS = 4
"""How many numbers of channels, the smallest, rows are tried with as lists of rows."""

_OURS = "This is a bug of this package; your model is untouched"


def proved(gm: fx.GraphModule, on_pass: OnPass | None, pipeline: Pipeline) -> fx.GraphModule:
    """Convert a copy of ``gm``; if rounding hides whether the outputs are equal, float64 decides.

    Args:
        gm: the prepared model.
        on_pass: as in `pdp_fx.convert`.
        pipeline: the passes that convert it.

    Raises:
        VerifyError: the outputs differ by more than rounding explains.
        StateError: the model cannot be copied.
    """
    dtype = next((p.dtype for p in gm.parameters() if p.is_floating_point()), torch.float32)
    if dtype == torch.float64:
        return _proved_in_double(gm, on_pass, pipeline)
    if dtype in TOLERANCE:
        with contextlib.suppress(VerifyError):
            return _converted(copied(gm), TOLERANCE[dtype], on_pass, pipeline)
    return _proved_by_twin(gm, dtype, on_pass, pipeline)


def _proved_in_double(gm: fx.GraphModule, on_pass: OnPass | None, pipeline: Pipeline) -> fx.GraphModule:
    """Convert a copy in float64; a larger difference is allowed only if the model amplifies rounding."""
    try:
        return _converted(copied(gm), TOLERANCE[torch.float64], on_pass, pipeline)
    except VerifyError:
        pruner = cast(Pruner, gm.get_submodule(CHILD))
        inputs = matching(cast(Inputs, pruner.example_inputs), gm)
        calls = (inputs, *(other for _, other, _ in _elsewhere(gm, pruner, inputs)))
        allowed = allowed_for(max(rounding_effect(gm, call) for call in calls))
        if allowed == TOLERANCE[torch.float64]:
            raise
    return _converted(copied(gm), allowed, on_pass, pipeline)


def allowed_for(rounding: float) -> float:
    """The difference allowed in float64 to a model whose outputs move by ``rounding`` (`rounding_effect`)."""
    allowed = AMPLIFIED * rounding
    return allowed if TOLERANCE[torch.float64] < allowed < MOST_AMPLIFIED else TOLERANCE[torch.float64]


def _proved_by_twin(
    gm: fx.GraphModule, dtype: torch.dtype, on_pass: OnPass | None, pipeline: Pipeline
) -> fx.GraphModule:
    """Convert a copy after a copy in float64, the twin, was converted and found equal.

    Rounding in the model's dtype can exceed the tolerance; in float64 it cannot, so a difference there proves
    an error. The tolerance in the model's own dtype is then the effect of rounding on the prepared model, and
    labels need not be equal, since rounding decides between equally likely ones. By chance the prepared model
    may order equal boxes as its twin does; in float32, where nothing better is left, larger roundings are
    tried, too. A model that cannot run in float64, because it creates tensors of a fixed dtype, is checked
    with a looser tolerance alone.

    Raises:
        VerifyError: the twins differ, or rounding moves the converted model much more than the prepared one.
    """
    loose = max(LOOSE, LOOSE_ROUNDINGS * torch.finfo(dtype).eps)
    try:
        twin = in_double(copied(gm))
        _proved_in_double(twin, None, pipeline)
    except VerifyError:
        raise
    except (PdpError, RuntimeError, TypeError) as err:
        logger.info("convert was checked in %s only: the model cannot run in float64: %s", dtype, err)
        return _converted(copied(gm), loose, on_pass, pipeline)
    tolerance = max(loose, AMPLIFIED * _rounding_of(gm, twin, dtype))
    better = torch.float64 if dtype == torch.float32 else torch.float32
    try:
        return _converted(copied(gm), min(tolerance, sys.float_info.max), on_pass, pipeline, labels=False)
    except VerifyError as err:
        raise VerifyError(
            f"{err}. In float64 it gives the same, so it is the rounding of {dtype} that spoils it: convert "
            f"the model in {str(better).removeprefix('torch.')}, and cast what convert gives"
        ) from err


def _rounding_of(gm: fx.GraphModule, twin: fx.GraphModule, dtype: torch.dtype) -> float:
    """How far the prepared model is from its float64 twin, relative to the scale of the output.

    In float32 also how far it moves by `AMPLIFIED` roundings of every product, if that is more.
    """
    given = cast(Pruner, gm.get_submodule(CHILD)).example_inputs
    if given is None:
        return 0.0
    inputs = matching(given, gm)
    exact = eval_outputs(twin, matching(inputs, twin))
    rounded = tuple(map(torch.Tensor.type_as, eval_outputs(gm, inputs), exact))
    effect = relative_difference(rounded, exact, labels=False)
    if dtype != torch.float32:
        return effect
    return max(effect, rounding_effect(gm, inputs, labels=False, roundings=AMPLIFIED))


def _converted(
    gm: fx.GraphModule, tolerance: float, on_pass: OnPass | None, pipeline: Pipeline, labels: bool = True
) -> fx.GraphModule:
    """Convert ``gm`` in place and return the plain result.

    Args:
        gm: a copy of the prepared model.
        tolerance: the difference allowed, relative to the scale of the output.
        on_pass: as in `pdp_fx.convert`.
        pipeline: as for `proved`.
        labels: as in `Reference`; if labels may differ, nothing is compared at other sizes.
    """
    pruner = gm.get_submodule(CHILD)
    if not isinstance(pruner, Pruner):
        raise StateError(
            f"the model's child '{CHILD}' is a {type(pruner).__name__}, and not the state that prepare has "
            "added; prepare the original model again"
        )
    inputs = None if pruner.example_inputs is None else matching(pruner.example_inputs, gm)
    ctx = Context(pruner.spec, inputs)
    ctx.put(pruner)
    if pruner.channels is not None and pruner.fingerprint == fingerprint(gm):
        ctx.put(pruner.channels)
    gm.eval()
    if inputs is not None:
        rounding = TOLERANCE[torch.float32]
        if tolerance < rounding:
            # A model of float64 weights may cast to float32 inside, as norms of language models do.
            with Precision() as precision:
                outputs = _given_by(gm, inputs)
            tolerance = tolerance if precision.double else rounding
        else:
            outputs = _given_by(gm, inputs)
        others = _elsewhere(gm, pruner, inputs) if labels else ()
        ctx.put(Reference(outputs, tolerance, labels, others, _on_other_ranks(gm, pruner, inputs)))
    pipeline.run(gm, ctx, on_pass)
    return ctx.get(Converted).module


def _given_by(gm: fx.GraphModule, inputs: Inputs) -> tuple[Tensor, ...]:
    """What the prepared model gives for its example, which it may not take any more, as a queue that is full.

    Raises:
        StateError: it fails.
    """
    try:
        return eval_outputs(gm, inputs)
    except Exception as err:
        raise StateError(
            "the prepared model fails on the example that it was made with, so that nothing can be proved of "
            f"what it is converted to: {type(err).__name__}: {err}; put its buffers back, as by "
            "load_state_dict, into a state in which it takes the example"
        ) from err


def _elsewhere(
    gm: fx.GraphModule, pruner: Pruner, inputs: Inputs
) -> tuple[tuple[str, Inputs, tuple[Tensor, ...]], ...]:
    """Inputs of other numbers and sizes, and the outputs on them, if channels may show something else there.

    The labels of channels tell what the graph does at other sizes; this is the proof.
    """
    if pruner.channels is None:
        return ()
    example = ExampleCall(*inputs)
    numbers = _taken(gm, example.with_other_numbers()) if example.shows_few_numbers else None
    found = [("on other numbers", numbers), *(_on_other_sizes(gm, pruner.channels, example))]
    return tuple((place, *taken) for place, taken in found if taken is not None)


def _on_other_sizes(
    gm: fx.GraphModule, channels: ChannelMap, example: ExampleCall
) -> Sequence[tuple[str, tuple[Inputs, tuple[Tensor, ...]] | None]]:
    """Ways in which sizes are others, with inputs of that kind and the outputs; None if none are taken."""
    if not channels.by_sizes:
        return ()
    free, widths = example.sizes_taken(partial(_outputs_on, gm)), widths_of(channels.shapes)
    return (
        ("on a batch of another size", _taken(gm, example.others())),
        ("on inputs of other sizes", _taken(gm, example.apart(free, single=False))),
        ("on inputs of sizes without common factors", _taken(gm, example.unlike(free, widths))),
    )


def _on_other_ranks(
    gm: fx.GraphModule, pruner: Pruner, inputs: Inputs
) -> tuple[tuple[Inputs, tuple[Tensor, ...]], ...]:
    """Inputs with one axis more and with one less that the model takes, and the outputs on them.

    Operations along axis 1 may take as many rows as there are channels for these.
    """
    if pruner.channels is None:
        return ()
    widths = sorted({len(classes) for classes in pruner.channels.slots.values()})[:FEW_WIDTHS]
    found = (_taken(gm, [call]) for call in ExampleCall(*inputs).of_other_ranks(widths))
    return tuple(taken for taken in found if taken is not None)


def _outputs_on(gm: fx.GraphModule, call: ExampleCall) -> tuple[Tensor, ...]:
    return eval_outputs(gm, (call.args, dict(call.kwargs)))


def _taken(gm: fx.GraphModule, calls: Iterable[ExampleCall]) -> tuple[Inputs, tuple[Tensor, ...]] | None:
    """The first of these calls that the model takes, and its outputs; None if it takes none."""
    found = first_taken(calls, partial(_outputs_on, gm))
    return None if found is None else ((found[0].args, dict(found[0].kwargs)), found[1])
