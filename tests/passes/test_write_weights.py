"""The pass that writes computed weights into the parameters that they stand for."""

import torch

import pdp_fx
from pdp_fx import PruneSpec, Schedule, Unstructured
from pdp_fx.compiler import Context
from pdp_fx.passes.write_weights import WriteWeights
from pdp_fx.weights.sources import computed
from tests.channels.checks import pruner_of
from tests.channels.nets_weights import LowRankAdapter, SpectralNorm


def test_a_weight_is_read_from_its_parameter_and_nothing_of_its_computation_is_left() -> None:
    torch.manual_seed(0)
    prepared = pdp_fx.prepare(LowRankAdapter(), PruneSpec(Unstructured(0.5)), torch.randn(2, 5, 6)).eval()
    pruner = pruner_of(prepared)
    (place,) = pruner.computed.values()
    expected = computed(prepared, next(node for node in prepared.graph.nodes if node.name == place))
    ctx = Context(pruner.spec)
    ctx.put(pruner)
    assert WriteWeights().run(prepared, ctx)
    assert torch.equal(prepared.get_parameter("hidden.weight"), expected)
    read = {str(node.target) for node in prepared.graph.find_nodes(op="get_attr")}
    assert "hidden.weight" in read
    assert not read & {"up", "down"}
    assert not pruner.computed
    assert not WriteWeights().run(prepared, ctx)


def test_a_weight_that_keeps_its_zeros_is_masked_in_its_parameter() -> None:
    spec = PruneSpec(Unstructured(0.5), schedule=Schedule(0, 1.0))
    prepared = pdp_fx.prepare(SpectralNorm(), spec, torch.randn(2, 3, 6, 6)).eval()
    assert pruner_of(prepared).computed == {}
