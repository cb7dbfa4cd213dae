"""Check that the outputs of what `convert` returns equal those of the prepared model in eval mode."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, fx

from pdp_fx.compiler import Context, Pass
from pdp_fx.errors import VerifyError
from pdp_fx.measuring import eval_outputs, relative_difference
from pdp_fx.plain import plain
from pdp_fx.tracing.examples import Inputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reference:
    """The prepared model's eval outputs on the example inputs, and the difference that is allowed.

    Attributes:
        outputs: all outputs that are tensors or numbers.
        tolerance: the largest difference allowed, relative to the scale of the output.
        labels: whether outputs of whole numbers, such as predicted labels, must be equal; not once those of a
            copy in float64 were.
        others: inputs of other numbers or sizes, how they differ from the example, and the outputs on them.
        ranks: inputs with more or fewer axes, and the outputs on them.
    """

    outputs: tuple[Tensor, ...]
    tolerance: float
    labels: bool = True
    others: tuple[tuple[str, Inputs, tuple[Tensor, ...]], ...] = ()
    ranks: tuple[tuple[Inputs, tuple[Tensor, ...]], ...] = ()

    def difference(self, gm: fx.GraphModule, inputs: Inputs, wanted: tuple[Tensor, ...]) -> float:
        """How far the outputs of ``gm`` are from the wanted ones, relative to their scale."""
        return relative_difference(eval_outputs(gm, inputs), wanted, self.labels)


@dataclass(frozen=True)
class Converted:
    """What `convert` returns.

    Attributes:
        module: the graph module of plain types (`plain.plain`), which is the one that is compared.
    """

    module: fx.GraphModule


@dataclass(frozen=True)
class Verified:
    """The largest difference from the prepared model, relative to the scale of the output.

    Attributes:
        difference: that on the example inputs.
        elsewhere: those on inputs of other numbers and sizes, by how these differ.
    """

    difference: float
    elsewhere: Mapping[str, float]


@dataclass(frozen=True)
class VerifyEquivalence(Pass):
    """Puts a `Converted` into the context and, with example inputs, a `Verified`."""

    name: ClassVar[str] = "verify-equivalence"
    calls: ClassVar[bool] = True

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        reference, bare = ctx.find(Reference), plain(gm)
        ctx.put(Converted(bare))
        if reference is None or ctx.example_inputs is None:
            logger.info("convert was not checked by numbers: the model was prepared without example inputs")
            return False
        difference = reference.difference(bare, ctx.example_inputs, reference.outputs)
        ctx.put(Verified(difference, _elsewhere(bare, reference)))
        return False

    def ensures(self, gm: fx.GraphModule, ctx: Context) -> None:
        verified, reference = ctx.find(Verified), ctx.find(Reference)
        if verified is None or reference is None:
            return
        places = {"": verified.difference, **{f" {place}": d for place, d in verified.elsewhere.items()}}
        for place, difference in places.items():
            if not difference <= reference.tolerance:
                raise VerifyError(
                    f"the converted model differs from the prepared one by {difference:.2e} of the output's "
                    f"scale{place}; at most {reference.tolerance:.0e} is expected. "
                    "The model you gave is untouched"
                )


def _elsewhere(gm: fx.GraphModule, reference: Reference) -> dict[str, float]:
    """The relative differences on other inputs; a warning says which of them ``gm`` refuses."""
    found: dict[str, float] = {}
    for place, inputs, wanted in reference.others:
        try:
            found[place] = reference.difference(gm, inputs, wanted)
        except Exception as err:  # noqa: BLE001 it holds for the inputs that the user has given
            logger.warning("the converted model fails %s, which the prepared model takes: %s", place, err)
    return found
