"""Weights that are computed from parameters: which parameters a single weight can be pruned in.

No table says what an operation does to a weight. The part of the graph that computes it is run
instead, with one half of a parameter set to zero, and then with the other: where zeros of the
parameter come out as zeros of the weight, a mask of the parameter is a mask of the weight.

Where they do not, as in weight standardisation, the value itself can be pruned if it has the shape of a
parameter that nothing else uses: masks are put on the value, and `convert` writes it into the parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pdp_fx.channels.record import StandIn
from pdp_fx.channels.running import evaluating
from pdp_fx.ops.kinds import attribute
from pdp_fx.tracing.functions import acts_in_place, written_by
from pdp_fx.tracing.modes import When, called_module
from pdp_fx.tracing.steps import LAYOUT
from pdp_fx.tracing.structure import tensors
from pdp_fx.tracing.watch import storage_of

Values = dict[str, Tensor]

Writes = dict[fx.Node, set[str]]
"""Nodes that write to parameters, with the parameters' names."""

TRIES = 4
"""How many single zeros are tried; some may hit what is cut off before the weight is used."""

SWITCH = When(torch._C._set_grad_enabled)
"""What turns gradients off or on for a step of training."""


@dataclass(frozen=True)
class Effect:
    """What a parameter does to a weight that is computed from it.

    Attributes:
        keeps_zeros: whether every place of the weight that follows the parameter is 0 with a part of it.
        keeps_columns: whether index j of axis 1 is index j of the weight's input channels.
    """

    keeps_zeros: bool
    keeps_columns: bool


def stored_nodes(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes whose values depend on parameters, buffers and constants only."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output") and all(n in found for n in _computed_from(node)):
            found.add(node)
    return found


def sources_of(node: fx.Node) -> list[fx.Node]:
    """``node`` and all that it is computed from, in graph order."""
    found, todo = {node}, [node]
    while todo:
        new = [source for source in _computed_from(todo.pop()) if source not in found]
        found.update(new)
        todo += new
    return sorted(found)


def computed_with(weight: fx.Node, trains: set[fx.Node]) -> list[fx.Node]:
    """What goes along if a weight is computed elsewhere, in graph order: its sources, and steps of training.

    Those are among its sources if they write to what it reads, as power iterations do.

    Args:
        weight: a node that depends on parameters, buffers and constants only.
        trains: the nodes that do nothing in eval mode.
    """
    sources = sources_of(weight)
    span = [sources[0]]
    while span[-1] is not weight:
        span.append(span[-1].next)
    while span[0].prev in trains and not acts_in_place(span[0].prev):
        span.insert(0, span[0].prev)  # as what turns gradients off for a step
    if not any(node in trains and acts_in_place(node) for node in span):
        return sources
    return sorted({source for node in span for source in sources_of(node)})


def _computed_from(node: fx.Node) -> list[fx.Node]:
    """The nodes whose numbers a node reads: not what lends its dtype, as in ``weight.to(x.dtype)``."""
    return [] if _asks_kind(node) else node.all_input_nodes


def _asks_kind(node: fx.Node) -> bool:
    return node.target is getattr and node.args[1] in ("dtype", "device")


def _run_through(run: fx.Interpreter, nodes: list[fx.Node]) -> None:
    """Run the sources of a weight; what lends a dtype and is none of them has that of the parameters."""
    for node in nodes:
        if _asks_kind(node) and node.args[0] not in run.env:
            lender = next(p for p in run.module.parameters() if p.is_floating_point())
            run.env[node] = getattr(lender, str(node.args[1]))
        else:
            run.env[node] = run.run_node(node)


def computed(gm: fx.GraphModule, weight: fx.Node) -> Tensor:
    """What a node that depends on nothing given gives in eval mode, differentiable in its parameters."""
    with evaluating(gm):
        return _value(gm, weight)


def _value(gm: fx.GraphModule, weight: fx.Node) -> Tensor:
    run = fx.Interpreter(gm, garbage_collect_values=False)
    _run_through(run, sources_of(weight))
    return run.env[weight]


class Standing:
    """Finds the parameters that computed weights can stand for; used inside a `trial` of the graph module.

    Args:
        gm: the graph module.
        names: the name of every parameter and buffer by its id.
    """

    def __init__(self, gm: fx.GraphModule, names: Mapping[int, str]) -> None:
        self._gm, self._names = gm, names
        self._readers: dict[str, list[fx.Node]] = {}
        self._overwritten: set[fx.Node] = set()
        self._idle = idle_in_eval(gm.graph)
        self._stored = stored_nodes(gm)
        steps: list[fx.Node] = []
        for node in gm.graph.nodes:
            for name in self._read_by(node):
                self._readers.setdefault(name, []).append(node)
            if acts_in_place(node) and node not in self._idle:
                self._overwritten.update(node.all_input_nodes)
            elif acts_in_place(node):
                steps.append(node)
        self._steps = memory_written(gm, steps, self._stored)

    def stand_in(self, weight: fx.Node, needed: bool) -> StandIn | None:
        """How a weight can stand for a parameter of its shape that nothing else uses; None if it cannot.

        Args:
            weight: a node that depends on parameters, buffers and constants only.
            needed: whether no parameter can be pruned in its place.
        """
        sources = sources_of(weight)
        if not self._overwritten.isdisjoint(sources):
            return None
        if any(_asks_kind(node) and node.args[0] not in sources for node in sources):
            return None  # What is written down does not follow the data's dtype.
        value = _value(self._gm, weight)
        if not torch.equal(value, _value(self._gm, weight)):
            return None  # It is drawn anew in every run, so one value cannot stand for it.
        read = {name: tensor for node in sources for name, tensor in self._read_by(node).items()}
        if not self._moves(weight, {storage_of(tensor) for tensor in read.values()}):
            return None
        for name, tensor in read.items():
            alike = isinstance(tensor, nn.Parameter) and tensor.shape == value.shape
            if alike and tensor.dtype == value.dtype and self._only_serves(name, sources):
                return StandIn(name, weight.name, frozenset(read), needed)
        return None

    def _moves(self, weight: fx.Node, memory: set[int]) -> bool:
        """Whether a weight can be computed earlier, with the steps of training that change what it reads."""
        steps = {node for node, written in self._steps.items() if not written.isdisjoint(memory)}
        together = set(computed_with(weight, self._idle))
        others = {node for node in self._idle - steps if acts_in_place(node)}
        own = (self._idle - others).union(sources_of(weight))
        switches = [node for node in together if node.target == SWITCH]
        return not steps or (steps <= together <= own & self._stored and len(switches) % 2 == 0)

    def _only_serves(self, name: str, sources: list[fx.Node]) -> bool:
        """Whether all that reads a tensor, at once or through other nodes, only serves the last source."""
        serving = set(self._readers[name]) - self._idle
        if any(node.op != "get_attr" for node in serving):
            return False
        for node in sources[:-1]:
            if not serving.isdisjoint(node.all_input_nodes):
                serving.add(node)
        inside = self._idle.union(sources)
        return serving <= inside and all(user in inside for node in serving for user in node.users)

    def _read_by(self, node: fx.Node) -> dict[str, Tensor]:
        """The parameters and buffers that a node gives or, inside a module, uses."""
        if node.op not in ("get_attr", "call_module"):
            return {}
        found = attribute(self._gm, node.target)
        held = [*found.parameters(), *found.buffers()] if isinstance(found, nn.Module) else [found]
        return {
            self._names[id(each)]: each
            for each in held
            if isinstance(each, Tensor) and id(each) in self._names
        }


def idle_in_eval(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that do nothing in eval mode: steps of training, as power iterations, and what they read."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        serves = bool(node.users) and found.issuperset(node.users)
        if _only_trains(node) or (serves and not node.is_impure() and not acts_in_place(node)):
            found.add(node)
    return found


def read_to_write(graph: fx.Graph, written: Writes, trains: set[fx.Node]) -> set[fx.Node]:
    """The nodes that write to parameters in training mode only, and what serves nothing else.

    Args:
        graph: the graph.
        written: what its `writes` are.
        trains: what is `idle_in_eval` in it.
    """
    found = trains.intersection(written)
    for node in reversed(graph.nodes) if found else ():
        if node in trains and node.users and found.issuperset(node.users):
            found.add(node)
    return found


def _only_trains(node: fx.Node) -> bool:
    flag: Any = node.args[0] if isinstance(node.target, When) else None
    return isinstance(flag, fx.Node) and flag.target is getattr and str(flag.args[1]) == "training"


def writes(gm: fx.GraphModule, names: Mapping[int, str]) -> Writes:
    """The nodes that write to parameters, be it through a view or in training mode only, with their names.

    Args:
        gm: the graph module, inside a `trial` of it.
        names: the name of every parameter and buffer by its id.
    """
    acting = [node for node in gm.graph.nodes if acts_in_place(node)]
    memory: dict[int, set[str]] = {}
    for parameter in gm.parameters() if acting else ():
        memory.setdefault(storage_of(parameter), set()).add(names[id(parameter)])
    places = memory_written(gm, acting, stored_nodes(gm)) if acting else {}
    found = {node: set[str]().union(*(memory.get(place, ()) for place in places[node])) for node in acting}
    return {node: written for node, written in found.items() if written}


def memory_written(
    gm: fx.GraphModule, acting: Iterable[fx.Node], stored: set[fx.Node]
) -> dict[fx.Node, set[int]]:
    """Where in memory each node that acts in place writes, as far as that are ``stored`` values.

    Args:
        gm: the graph module, inside a `trial` of it.
        acting: the nodes.
        stored: what is `stored_nodes` in it.
    """
    run = fx.Interpreter(gm, garbage_collect_values=False)
    found: dict[fx.Node, set[int]] = {}
    for node in acting:
        targets = [written for written in written_by(node) if written in stored]
        for target in targets:
            _run_through(run, [source for source in sources_of(target) if source not in run.env])
        found[node] = {storage_of(value) for value in tensors([run.env[target] for target in targets])}
    return found


def read_before_written(
    gm: fx.GraphModule, names: Mapping[int, str], written: Writes, trains: set[fx.Node]
) -> set[str]:
    """The parameters that training steps write to after they have been read for anything else.

    What was made of them is then not what they are: a masked value would not follow, and its gradient needs
    what they were.

    Args:
        gm: the graph module, inside a `trial` of it.
        names: the name of every parameter and buffer by its id.
        written: what its `writes` are.
        trains: what is `idle_in_eval` in its graph.
    """
    writing = read_to_write(gm.graph, written, trains)
    stored, read, found = stored_nodes(gm), set[str](), set[str]()
    for node in gm.graph.nodes if writing else ():
        if node in writing:
            found |= read.intersection(written.get(node, ()))
        else:
            read |= _used_by(gm, node, names, stored)
    return found


def _used_by(gm: fx.GraphModule, node: fx.Node, names: Mapping[int, str], stored: set[fx.Node]) -> set[str]:
    """The parameters that a node reads at once; those without gradients only if others are made of them."""
    if node.target is getattr or node.target in LAYOUT:
        return set()
    called = called_module(node)
    inside = [] if called is None else [*gm.get_submodule(called).parameters()]
    given = [attribute(gm, source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    used = [each for each in (*inside, *given) if isinstance(each, nn.Parameter)]
    return {names[id(each)] for each in used if each.requires_grad or node in stored}


def effects(gm: fx.GraphModule, weight: fx.Node, names: Iterable[str], axis: int) -> dict[str, Effect]:
    """What each of the parameters ``names`` does to the value of ``weight``.

    Args:
        gm: the graph module, inside a `trial` of it.
        weight: a node that depends on parameters, buffers and constants only.
        names: parameters of at least two axes that it depends on.
        axis: the axis of the weight's input channels.
    """
    found = dict.fromkeys(names, Effect(False, False))
    with contextlib.suppress(RuntimeError):  # an inverse, for one, may not exist with zeros
        run = _Run(gm, weight)
        for name in found:
            found[name] = _effect(run, name, axis)
    return found


def _effect(run: _Run, name: str, axis: int) -> Effect:
    """Every place that follows the parameter must be 0 with one half of it or with the other."""
    dense = run.values[name]
    holes = run.random(dense.shape).to(dense.device) < 0.5
    halves = [run.result(name, dense * half) for half in (holes, ~holes)]
    changed = torch.stack([half != run.dense for half in halves]).any(dim=0)
    zero = torch.stack([run.zeros(half) for half in halves]).any(dim=0)
    if not changed.any() or not torch.equal(changed, zero) or _misses_single_zeros(run, name):
        return Effect(False, False)
    size = dense.shape[1]
    return Effect(
        True, all(_is_column(run, name, place, axis) for place in {0, min(1, size - 1), size // 2, size - 1})
    )


def _misses_single_zeros(run: _Run, name: str) -> bool:
    """Whether a single zero somewhere changes the weight and leaves no zero there."""
    for _ in range(TRIES):
        holed = run.values[name].reshape(-1).clone()
        holed[int(run.random(()) * holed.numel())] = 0
        weight = run.result(name, holed.reshape(run.values[name].shape))
        if not torch.equal(weight, run.dense) and not bool(run.zeros(weight).any()):
            return True
    return False


def _is_column(run: _Run, name: str, place: int, axis: int) -> bool:
    """Whether nothing but column ``place`` of the weight vanishes with that of the parameter."""
    values = run.values[name].clone()
    values[:, place] = 0
    zeros = run.zeros(run.result(name, values))
    others = [other for other in range(zeros.ndim) if other != axis % zeros.ndim]
    return torch.nonzero(zeros.any(dim=others)).reshape(-1).tolist() in ([], [place])


class _Run(fx.Interpreter):
    """Computes a weight; where a parameter is 0, as adapters start, it has another value."""

    def __init__(self, gm: fx.GraphModule, weight: fx.Node) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._generator = torch.Generator().manual_seed(0)
        self.values: Values = {}
        self._weight, self._nodes = weight, sources_of(weight)
        self._chosen: Values = {}
        self.dense = self._computed({})

    def result(self, name: str, value: Tensor) -> Tensor:
        """The weight when the parameter ``name`` has this value."""
        return self._computed({name: value})

    def random(self, shape: Sequence[int]) -> Tensor:
        """Numbers in [0, 1), the same in every run and on every device; they are on the CPU."""
        return torch.rand(shape, generator=self._generator, device="cpu")

    def zeros(self, weight: Tensor) -> Tensor:
        """Where a weight is 0 that is not 0 otherwise."""
        return (weight == 0) & (self.dense != 0)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A parameter's own or chosen values; a copy of anything else."""
        value = super().get_attr(target, args, kwargs)
        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, nn.Parameter):
            return value.clone()
        if target not in self.values:
            other = 0.5 + self.random(value.shape).to(value)
            self.values[target] = torch.where(value == 0, other, value)
        return self._chosen.get(target, self.values[target]).clone()

    def _computed(self, chosen: Values) -> Tensor:
        self._chosen, self.env = chosen, {}
        _run_through(self, self._nodes)
        return self.env[self._weight]
