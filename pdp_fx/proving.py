"""Converting a copy of a prepared model, with a proof by numbers that its outputs stay what they were."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections import OrderedDict
from typing import Any, cast

import torch
from torch import Tensor, fx

from pdp_fx.compiler import Context, OnPass
from pdp_fx.errors import PdpError, StateError, VerifyError
from pdp_fx.example_inputs import matching
from pdp_fx.fingerprint import fingerprint
from pdp_fx.passes import CONVERT
from pdp_fx.passes.verify_equivalence import (
    Precision,
    Reference,
    eval_outputs,
    relative_difference,
    rounding_effect,
)
from pdp_fx.plain import plain
from pdp_fx.pruner import CHILD, Pruner
from pdp_fx.tracing.replacing import ALONE, replaced

logger = logging.getLogger(__name__)

LOOSE = 1e-4
LOOSE_ROUNDINGS = 16
"""So many roundings of its dtype, and `LOOSE` at least, are allowed where float64 decides or cannot."""

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}

AMPLIFIED = 10
"""How much further than one change of every last bit a converted model may be from the prepared one."""

MOST_AMPLIFIED = 1e-6
"""A model that amplifies rounding beyond this cannot be told from one with a wrong index."""


def proved(gm: fx.GraphModule, on_pass: OnPass | None) -> fx.GraphModule:
    """Convert a copy; where float32 rounding hides whether it is equal, float64 decides.

    Raises:
        VerifyError: the outputs differ by more than rounding explains.
        StateError: the model cannot be copied.
    """
    dtype = next((p.dtype for p in gm.parameters() if p.is_floating_point()), torch.float32)
    if dtype == torch.float64:
        return _proved_in_double(gm, on_pass)
    if dtype in TOLERANCE:
        with contextlib.suppress(VerifyError):
            return _converted(_copy(gm), TOLERANCE[dtype], on_pass)
    return _proved_by_twin(gm, dtype, on_pass)


def _proved_in_double(gm: fx.GraphModule, on_pass: OnPass | None) -> fx.GraphModule:
    """Convert a copy; more than the tolerance is allowed only to a model that amplifies rounding as much."""
    try:
        return _converted(_copy(gm), TOLERANCE[torch.float64], on_pass)
    except VerifyError:
        pruner = gm.get_submodule(CHILD)
        inputs = matching(cast(Pruner, pruner).example_inputs, gm)
        allowed = allowed_for(rounding_effect(gm, inputs))
        if allowed == TOLERANCE[torch.float64]:
            raise
    return _converted(_copy(gm), allowed, on_pass)


def allowed_for(rounding: float) -> float:
    """The difference in float64 allowed to a model that makes this much of one rounding of its products."""
    allowed = AMPLIFIED * rounding
    return allowed if TOLERANCE[torch.float64] < allowed < MOST_AMPLIFIED else TOLERANCE[torch.float64]


def _proved_by_twin(gm: fx.GraphModule, dtype: torch.dtype, on_pass: OnPass | None) -> fx.GraphModule:
    """Convert a copy, once its float64 twin has been found equal.

    Rounding alone can exceed the tolerance; in float64 it cannot, so there a difference is a proof. What
    rounding may then do is measured by what it does to the prepared model, and labels may fall otherwise
    where two are as good. A model that cannot run in float64, because it makes tensors of a fixed dtype, is
    checked by a looser bound alone.

    Raises:
        VerifyError: the float64 twins differ, or rounding spoils the converted model much more.
    """
    loose = max(LOOSE, LOOSE_ROUNDINGS * torch.finfo(dtype).eps)
    try:
        twin = _copy(gm).double()
        _proved_in_double(twin, None)
    except VerifyError:
        raise
    except (PdpError, RuntimeError, TypeError) as err:
        logger.info("convert was checked in %s only: the model cannot run in float64: %s", dtype, err)
        return _converted(_copy(gm), loose, on_pass)
    tolerance = max(loose, AMPLIFIED * _rounding_of(gm, twin))
    try:
        return _converted(_copy(gm), min(tolerance, sys.float_info.max), on_pass, labels=False)
    except VerifyError as err:
        raise VerifyError(
            f"{err}. In float64 it gives the same, so it is the rounding of {dtype} that spoils it: convert "
            "the model in float32, and cast what convert gives"
        ) from err


def _rounding_of(gm: fx.GraphModule, twin: fx.GraphModule) -> float:
    """How far the prepared model is from its float64 twin, relative to the scale of the output."""
    given = cast(Pruner, gm.get_submodule(CHILD)).example_inputs
    if given is None:
        return 0.0
    inputs = matching(given, gm)
    exact = eval_outputs(twin, matching(inputs, twin))
    rounded = tuple(map(torch.Tensor.type_as, eval_outputs(gm, inputs), exact))
    return relative_difference(rounded, exact, labels=False)


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of its own; results of the last forward, which hooks may have kept, lose their history."""
    deepcopy = Tensor.__deepcopy__

    def without_history(tensor: Tensor, memo: Any) -> Any:
        return deepcopy(tensor if tensor.is_leaf else tensor.detach(), memo)

    try:
        with ALONE, replaced(Tensor, "__deepcopy__", without_history):
            copied = copy.deepcopy(gm, _empty_tables(gm))
    except Exception as err:
        raise StateError(f"the model cannot be copied: {type(err).__name__}: {err}") from err
    # Every graph module has a class of its own, whose name deepcopy forgets.
    type(copied).__name__ = type(gm).__name__
    return copied


def _empty_tables(gm: fx.GraphModule) -> dict[int, Any]:
    """What deepcopy is told of the dozen empty tables that every module has, and which take it long."""
    tables = [value for module in gm.modules() for value in vars(module).values()]
    empty = [table for table in tables if type(table) is OrderedDict and not table]
    return {id(table): OrderedDict[str, Any]() for table in empty}


def _converted(
    gm: fx.GraphModule, tolerance: float, on_pass: OnPass | None, labels: bool = True
) -> fx.GraphModule:
    """Convert ``gm``, which is ours to change; ``labels`` as in `Reference`."""
    pruner = gm.get_submodule(CHILD)
    if not isinstance(pruner, Pruner):
        raise StateError("the model's 'pdp' child is not what prepare has put there")
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
                outputs = eval_outputs(gm, inputs)
            tolerance = tolerance if precision.double else rounding
        else:
            outputs = eval_outputs(gm, inputs)
        ctx.put(Reference(outputs, tolerance, labels))
    CONVERT.run(gm, ctx, on_pass)
    return plain(gm)
