import pytest
import torch
from torch import nn

import pdp_fx
from pdp_fx.demo.flips import FlipCounter, mask_units
from pdp_fx.demo.variants import VARIANTS


def prepared_line(weights: list[float]) -> tuple[nn.Linear, nn.Module]:
    line = nn.Linear(len(weights), 1, bias=False)
    line.weight.data = torch.tensor([weights])
    spec = pdp_fx.PruneSpec(pdp_fx.Unstructured(0.5), schedule=pdp_fx.Schedule(start=0, epsilon=1.0))
    return line, pdp_fx.prepare(line, spec, torch.ones(1, len(weights)))


def test_flips_are_counted_by_direction() -> None:
    line, prepared = prepared_line([1.0, -2.0, 3.0, 4.0])
    flips = FlipCounter(prepared)
    pdp_fx.step(prepared)
    flips.record()
    line.weight.data[0, 0] = -5.0
    flips.record()
    assert flips.newly_pruned == [0.5, 0.25]
    assert flips.restored == [0.0, 0.25]


def test_units_are_weights_with_their_sign() -> None:
    _, prepared = prepared_line([1.0, -2.0, 3.0, -4.0])
    pdp_fx.step(prepared)
    units = mask_units(prepared)
    assert units.magnitudes.tolist() == [1.0, -2.0, 3.0, -4.0]
    assert units.pruned.tolist() == [True, True, False, False]


def test_a_model_without_masks_is_refused() -> None:
    with pytest.raises(pdp_fx.StateError, match="has masks"):
        mask_units(nn.Linear(2, 2))


def test_the_variants_have_different_names() -> None:
    assert (
        len({variant.name for variant in VARIANTS}) == len({variant.file_name for variant in VARIANTS}) == 4
    )
