"""Writing one graph from the recordings of both modes.

A step that both modes share becomes one node. If its arguments differ, `{False: in_eval, True:
in_train}[training]` picks one; a flag that is False in eval and True in train becomes the training flag
itself. A step of one mode only may run in both modes if that is harmless: its result is not picked in the
other, and the code of the graph leaves it out there (`pdp_fx.tracing.blocks`). If it draws random numbers,
changes a tensor, or needs the result of such a step, it is wrapped in `When`, which calls it in its own mode
only.
"""

from collections.abc import Iterable
from typing import Any

from torch import fx, nn

from pdp_fx.tracing.align import Alignment, Pair
from pdp_fx.tracing.arguments import all_values
from pdp_fx.tracing.blocks import MAY_WAIT, SKIPPED
from pdp_fx.tracing.functions import kept_alive
from pdp_fx.tracing.recomputing import RECOMPUTED
from pdp_fx.tracing.selecting import IDLE, SELECTS
from pdp_fx.tracing.skipping import kept_unless
from pdp_fx.tracing.steps import Attribute, Constant, Expr, Scope, Step, Whole, parts_of, root
from pdp_fx.tracing.writer import Gate, Writer, nodes_in


def write_graph(
    tree: nn.Module, model: nn.Module, alignment: Alignment, gate_all: bool
) -> tuple[fx.Graph, set[fx.Node]]:
    """The graph of both recordings, and the nodes that must stay even if they have no users.

    Args:
        tree: the modules of the future graph module; constants and the root's training flag are added to it.
        model: the model.
        alignment: the paired recordings.
        gate_all: whether to run no step in a mode that it was not recorded in, even if it is harmless.
    """
    uses: dict[Whole, frozenset[str]] = {}
    for step in (*alignment.in_eval.steps, *alignment.in_train.steps):
        if isinstance(step.target, Whole):
            uses[step.target] = uses.get(step.target, frozenset()) | step.uses
    merge = _Merge(Writer(tree, model, uses), alignment, gate_all)
    for pair in alignment.pairs:
        merge.add(pair)
    merge.output(alignment.in_eval.output, alignment.in_train.output)
    return merge.writer.graph, merge.writer.protected


class _Merge:
    """The graph so far, and the node of each step and expression."""

    def __init__(self, writer: Writer, alignment: Alignment, gate_all: bool) -> None:
        self.writer = writer
        self.recordings = (alignment.in_eval, alignment.in_train)
        self.alignment = alignment
        self.gate_all = gate_all
        self._nodes: dict[tuple[bool, Step | Expr], fx.Node] = {}
        # Expressions are nested; a number as the key of each keeps every one from being taken apart twice.
        self._keys: dict[Expr, int] = {}
        self._numbers: dict[Any, int] = {}
        self._places = {step: i for i, pair in enumerate(alignment.pairs) for step in pair.steps}
        self._shared = self._expressions(False) & self._expressions(True)
        self._single: set[tuple[bool, Step | None]] = set()
        # The modules by whose flags a node is only in one mode what it is.
        self._deciders: dict[fx.Node, frozenset[str]] = {}

    def add(self, pair: Pair) -> None:
        """Write the next step."""
        if pair.in_eval is not None and pair.in_train is not None:
            self._add_shared(pair.in_eval, pair.in_train)
        elif pair.in_eval is not None:
            self._add_single(pair.in_eval, False, self.alignment.decides(pair))
        elif pair.in_train is not None and pair.in_train.target is kept_unless:
            self._add_choice(pair.in_train, self.alignment.decides(pair))
        elif pair.in_train is not None:
            self._add_single(pair.in_train, True, self.alignment.decides(pair))

    def _expressions(self, training: bool) -> set[Any]:
        """The keys of all expressions that steps of one mode use."""
        recording = self.recordings[training]
        used = [(step.args, step.kwargs) for step in recording.steps], recording.output
        return {self._key(part) for part in parts_of(used) if isinstance(part, Expr)}

    def _key(self, value: Any) -> Any:
        """A key that expressions of the two modes share if they compute the same from paired steps."""
        if isinstance(value, Step):
            return "step", self._places[value]
        if not isinstance(value, Expr):
            return type(value), value
        if value not in self._keys:
            parts = tuple(self._key(part) for part in all_values((value.args, value.kwargs)))
            form = value.call, len(value.args), tuple(value.kwargs)
            self._keys[value] = self._numbers.setdefault((form, parts), len(self._numbers))
        return Expr, self._keys[value]

    def _gate_of_expression(self, value: Expr, training: bool) -> Gate | None:
        """A condition for an expression of one mode that may fail in the other; None if it cannot.

        It may fail if it reads the result of an opaque module, whose structure may differ, or an optional
        input, or a part that a split into more parts has in one mode.
        """
        maker = root(value)
        if maker is None or self._key(value) in self._shared:
            return None
        may_fail = bool(maker.reason) or _is_optional(maker) or self.gate_all
        return Gate(self._flag(maker.scope), training) if may_fail else None

    def _flag(self, scope: Scope) -> str:
        """The module by whose flag steps in a call differ; that of several are alike is checked."""
        return self._one_of(self.alignment.flags_in(scope))

    def _one_of(self, deciders: Iterable[str]) -> str:
        """The first of several modules; that they are in one mode is checked."""
        ordered = sorted(deciders)
        self.writer.check_alike(*ordered)
        return ordered[0]

    def _decide(self, node: fx.Node) -> frozenset[str]:
        """The modules by whose flags a node is there in one mode only, or computed of such."""
        if node not in self._deciders:
            self._deciders[node] = frozenset[str]().union(*map(self._decide, node.all_input_nodes))
        return self._deciders[node]

    def output(self, in_eval: Any, in_train: Any) -> None:
        """Write what the model returns."""
        self.writer.at("", "")
        for together in sorted(self.alignment.alike):
            self.writer.check_alike(*together)
        self.writer.output(self._join(self._lower(in_eval, False), self._lower(in_train, True), Scope("")))

    def _add_shared(self, in_eval: Step, in_train: Step) -> None:
        scope = in_eval.scope
        self.writer.at(scope.path, in_eval.source)
        args = self._join(self._lower(in_eval.args, False), self._lower(in_train.args, True), scope)
        kwargs = self._join(self._lower(in_eval.kwargs, False), self._lower(in_train.kwargs, True), scope)
        lasting = in_train.observed or in_train.random or in_train.updates
        step = in_train if lasting else in_eval
        node = self.writer.step(step, args, kwargs)
        self._nodes[False, in_eval] = self._nodes[True, in_train] = node
        self._deciders[node] = frozenset()
        _note_parts(node, in_train)
        _note_selection(node, in_eval)

    def _add_single(self, step: Step, training: bool, scope: Scope) -> None:
        self.writer.at(step.scope.path, step.source)
        args, kwargs = self._lower(step.args, training), self._lower(step.kwargs, training)
        own = all((training, root(value)) in self._single for value in step.changes)
        optional = any(_is_optional(root(value)) for value in all_values((step.args, step.kwargs)))
        harmless = own and not optional and self.writer.is_harmless(step, training) and not self.gate_all
        # What else decides on what it is given has to be in the same mode, as in the recordings.
        deciders = frozenset(self.alignment.flags_in(scope)).union(
            *map(self._decide, nodes_in((args, kwargs)))
        )
        gate = self.writer.gate_of((args, kwargs)) if harmless else Gate(self._one_of(deciders), training)
        self._single.add((training, step))
        node = self._nodes[training, step] = self.writer.step(step, args, kwargs, gate)
        self._deciders[node] = deciders
        if gate is None:
            # What it changes, if anything, is seen by the users of its result alone.
            node.meta[MAY_WAIT] = True
        if training:
            _note_parts(node, step)
        else:
            _note_selection(node, step)

    def _add_choice(self, choice: Step, scope: Scope) -> None:
        """Write a choice, which what follows uses in eval mode, too: there is no flag then that skips."""
        self.writer.at(choice.scope.path, choice.source)
        flag, *others = self._lower(choice.args, True)
        if self.writer.gate_of(flag) is None:
            flag = self.writer.pick(False, flag, self._flag(scope))
        node = self.writer.step(choice, (flag, *others), {})
        node.meta[SKIPPED] = choice.skipped
        made = self.alignment.pairs[self._places[choice.args[2]]]
        self._nodes[True, choice] = node
        if made.in_eval is not None:
            self._nodes[False, made.in_eval] = node

    def _lower(self, tree: Any, training: bool) -> Any:
        """The arguments of a step of one mode, with nodes in the place of values."""
        if isinstance(tree, Step):
            return self._nodes[training, tree]
        if isinstance(tree, Attribute):
            return self.writer.attribute(tree.path)
        if isinstance(tree, Constant):
            return self.writer.constant(tree.tensor)
        if isinstance(tree, Expr):
            return self._lower_expression(tree, training)
        if isinstance(tree, slice):
            return slice(*(self._lower(part, training) for part in (tree.start, tree.stop, tree.step)))
        return self._lower_container(tree, training)

    def _lower_expression(self, value: Expr, training: bool) -> fx.Node:
        if (training, value) not in self._nodes:
            args, kwargs = self._lower(value.args, training), self._lower(value.kwargs, training)
            gate = self._gate_of_expression(value, training)
            self._nodes[training, value] = self.writer.expression(value.call, args, kwargs, gate)
        return self._nodes[training, value]

    def _lower_container(self, tree: Any, training: bool) -> Any:
        if isinstance(tree, tuple):
            return tuple(self._lower(part, training) for part in tree)
        if isinstance(tree, list):
            return [self._lower(part, training) for part in tree]
        if isinstance(tree, dict):
            return {key: self._lower(part, training) for key, part in tree.items()}
        return tree

    def _join(self, in_eval: Any, in_train: Any, scope: Scope) -> Any:
        """The argument of a shared step, from its arguments in the two modes."""
        if _same(in_eval, in_train):
            return in_eval
        if type(in_eval) is not type(in_train):
            return self._pick(in_eval, in_train, scope)
        if isinstance(in_eval, dict) and list(in_eval) == list(in_train):
            return {key: self._join(in_eval[key], in_train[key], scope) for key in in_eval}
        if isinstance(in_eval, tuple | list) and len(in_eval) == len(in_train):
            parts = [self._join(a, b, scope) for a, b in zip(in_eval, in_train, strict=True)]
            return type(in_eval)(parts)
        return self._pick(in_eval, in_train, scope)

    def _pick(self, in_eval: Any, in_train: Any, scope: Scope) -> fx.Node:
        """One of two values by the flags of the modules that have made them differ, or may have.

        These are those that decide on steps of one mode which made the values, and those that are asked in
        the call that uses them, or around it. If there are none, any that is asked may have given another
        number, say.
        """
        made = frozenset[str]().union(*map(self._decide, nodes_in((in_eval, in_train))))
        deciders = made | self.alignment.flags_around(scope) or self.alignment.asked
        return self.writer.pick(in_eval, in_train, self._one_of(deciders or self.alignment.flags_in(scope)))


def _note_parts(node: fx.Node, in_train: Step) -> None:
    """Note in the node which part of the code the step belongs to, if it is one that passes need not know."""
    if in_train.recomputed:
        node.meta[RECOMPUTED] = in_train.recomputed
    if in_train.skipped:
        node.meta[SKIPPED] = in_train.skipped
    _note_selection(node, in_train)


def _note_selection(node: fx.Node, step: Step) -> None:
    if step.selects:
        node.meta[SELECTS] = step.selects
    if step.idle:
        node.meta[IDLE] = step.idle


def _is_optional(step: Step | None) -> bool:
    return step is not None and step.op == "placeholder" and bool(step.args)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, slice):
        return _same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    return one is other or one == other or (one != one and other != other)


def without_dead_code(graph: fx.Graph, protected: set[fx.Node]) -> None:
    """Remove nodes without users, and write the others so that later passes will not remove them.

    Args:
        graph: the graph, owned by its module; changed.
        protected: nodes that must stay although they may have no users.
    """
    graph.eliminate_dead_code(lambda node: node in protected or node.is_impure())
    for node in protected:
        function = kept_alive(node.target) if node.op == "call_method" else None
        if function is not None and not node.users:
            node.op, node.target = "call_function", function
