"""The graph of channels says what the analysis found, in a form that networkx and its exporters take."""

import json
from pathlib import Path

import networkx as nx
import pytest
import torch
from networkx.algorithms import bipartite
from torch import fx, nn
from torchvision import models  # pyright: ignore[reportMissingTypeStubs]

import pdp_fx
from pdp_fx import NM, Channels, PruneSpec, StateError, Unstructured
from pdp_fx.channel_graph import AXIS, GROUP, Graph, axis_name
from pdp_fx.channels.channel_map import ChannelGroup
from tests.nets import NETS, at_once, net, state

HALF = at_once(Channels(ratio=0.5))


def resnet18() -> fx.GraphModule:
    return pdp_fx.prepare(models.resnet18(), HALF, torch.randn(1, 3, 32, 32))


def groups_of(prepared: nn.Module) -> list[ChannelGroup]:
    channels = state(prepared).channels
    assert channels is not None
    return [*channels.groups, *channels.frozen]


def nodes(graph: Graph, side: int) -> list[str]:
    return [name for name, node in graph.nodes(data=True) if node["bipartite"] == side]


@pytest.mark.parametrize("name", NETS)
def test_the_neighbours_of_a_group_are_its_members(name: str) -> None:
    model, x = net(name)
    prepared = pdp_fx.prepare(model, HALF, x)
    graph = pdp_fx.channel_graph(prepared)
    groups = groups_of(prepared)
    assert sorted(nodes(graph, GROUP)) == sorted(group.name for group in groups)
    for group in groups:
        assert set(graph[group.name]) == {axis_name(slot) for slot in group.members}
        assert graph.nodes[group.name]["width"] == group.width


def test_where_axes_carry_one_group_each_the_components_are_the_groups() -> None:
    prepared = resnet18()
    graph = pdp_fx.channel_graph(prepared)
    axes = set(nodes(graph, AXIS))
    components = {frozenset(component & axes) for component in nx.connected_components(graph)}
    assert components == {frozenset(map(axis_name, group.members)) for group in groups_of(prepared)}


def test_within_a_group_the_axes_are_connected_where_axes_carry_many_groups() -> None:
    prepared = pdp_fx.prepare(models.densenet121(), HALF, torch.randn(1, 3, 32, 32))
    graph = pdp_fx.channel_graph(prepared)
    assert nx.number_connected_components(graph) < len(nodes(graph, GROUP))
    for group in groups_of(prepared):
        members = {axis_name(slot) for slot in group.members}
        inside = graph.subgraph({group.name} | members)
        assert nx.is_connected(inside)
        assert set(inside) - members == {group.name}


def test_an_edge_counts_the_channels_that_the_axis_carries() -> None:
    prepared = pdp_fx.prepare(models.densenet121(), HALF, torch.randn(1, 3, 32, 32))
    graph = pdp_fx.channel_graph(prepared)
    joined = "features.denseblock1.denselayer2.norm1.weight[0]"
    counts = {group: edge["channels"] for group, edge in graph[joined].items()}
    assert counts == {"features.conv0": 64, "features.denseblock1.denselayer1.conv2": 32}
    assert graph.nodes[joined]["width"] == sum(counts.values())


def test_kinds_tell_makers_readers_norms_and_the_rest() -> None:
    model, x = net("residual")
    graph = pdp_fx.channel_graph(pdp_fx.prepare(model, HALF, x))
    kinds = {name: graph.nodes[name]["kind"] for name in graph}
    assert kinds["expand.0.weight[0]"] == "producer"
    assert kinds["project.0.weight[1]"] == "reader"
    assert kinds["expand.1.running_var[0]"] == "norm"
    assert kinds["depthwise.0.weight[0]"] == "carrier"
    assert kinds["stem.0.bias[0]"] == "carrier"
    assert (kinds["expand.0"], kinds["fc"]) == ("group", "frozen")


def test_frozen_groups_and_their_axes_hold_the_reasons() -> None:
    graph = pdp_fx.channel_graph(resnet18())
    assert graph.nodes["fc"]["reasons"] == "%output: the model returns these channels"
    assert graph.nodes["fc.weight[0]"]["reasons"] == graph.nodes["fc"]["reasons"]
    assert graph.nodes["fc.weight[1]"]["reasons"] == ""
    assert graph.nodes["layer1.0.conv1"]["rule"] == "Channels(ratio=0.5)"
    assert graph.nodes["fc"]["rule"] == ""


def test_reasons_of_the_spec_are_in_the_graph_too() -> None:
    model, x = net("conv")
    spec = PruneSpec(Channels(ratio=0.5), overrides={"conv2": NM(2, 4)})
    graph = pdp_fx.channel_graph(pdp_fx.prepare(model, spec, x))
    assert graph.nodes["conv1"]["kind"] == "frozen"
    assert "pruned N:M along these channels" in graph.nodes["conv1"]["reasons"]


def test_the_graph_is_bipartite_and_in_the_order_of_the_model() -> None:
    graph = pdp_fx.channel_graph(resnet18())
    assert bipartite.is_bipartite_node_set(graph, nodes(graph, GROUP))
    assert nodes(graph, GROUP)[:3] == ["conv1", "layer1.0.conv1", "layer1.1.conv1"]
    assert nodes(graph, GROUP)[-1] == "fc"
    assert nodes(graph, AXIS)[0] == "conv1.weight[0]"


def test_the_graph_can_be_exported_and_read_back(tmp_path: Path) -> None:
    graph = pdp_fx.channel_graph(resnet18())
    nx.write_graphml(graph, tmp_path / "channels.graphml")
    read = nx.read_graphml(tmp_path / "channels.graphml")
    assert {name: read.nodes[name] for name in read} == {name: graph.nodes[name] for name in graph}
    assert read.adj == graph.adj
    nx.write_gml(graph, tmp_path / "channels.gml")
    assert set(nx.read_gml(tmp_path / "channels.gml")) == set(graph)
    data = json.loads(json.dumps(nx.node_link_data(graph)))
    assert nx.utils.graphs_equal(nx.node_link_graph(data), graph)


def test_frozen_axes_are_those_whose_every_channel_stays() -> None:
    graph = pdp_fx.channel_graph(resnet18())
    staying = {axis for axis in nodes(graph, AXIS) if graph.nodes[axis]["reasons"]}
    assert staying == {"fc.weight[0]", "fc.bias[0]"}


def test_a_model_without_known_channels_is_refused() -> None:
    with pytest.raises(StateError, match="came from pdp_fx.prepare"):
        pdp_fx.channel_graph(nn.Linear(2, 2))
    with pytest.raises(StateError, match="without example inputs"):
        pdp_fx.channel_graph(pdp_fx.prepare(net("mlp")[0], at_once(Unstructured(0.5))))
