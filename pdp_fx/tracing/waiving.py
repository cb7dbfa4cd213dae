"""Removing checks of sizes that turn out to be stricter than the model."""

import logging
from collections.abc import Container, Mapping
from typing import Any

from torch import fx, nn

from pdp_fx.tracing.erasing import erase
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.functions import NUMBER_HOMES, acts_in_place
from pdp_fx.tracing.interpreting import Interpreter
from pdp_fx.tracing.outcome import Outcome
from pdp_fx.tracing.steps import LAYOUT, How
from pdp_fx.tracing.verify import Runner, run, tried
from pdp_fx.tracing.writer import DECIDES

_log = logging.getLogger(__name__)


def waive(gm: fx.GraphModule, model: nn.Module, example: ExampleCall, wanted: Mapping[bool, Outcome]) -> bool:
    """Erase the checks of sizes that fail on an example, if the graph is right for it without them.

    A model may take different branches with equal results, such as to expand a tensor of size 1 or not. Of
    which a plain number was made, a size is another in each example, and one says nothing of the others. Nor
    does one batch of all others, so that the graph must not be wrong for a few more of them.

    Args:
        gm: the graph; changed only if it is right.
        model: what it was traced from; it is put back as it was.
        example: the arguments.
        wanted: what the model gives in each mode.

    Returns:
        Whether the graph gives the same now.
    """
    failed: set[fx.Node] = set()
    for training, outcome in wanted.items():
        try:
            got = run(gm, example, training, _past_checks(failed), model)
        except Exception as err:  # noqa: BLE001 a graph that fails is a graph that is not right
            _log.info("fails without checks of sizes, too: %s", err)
            return False
        if outcome.difference(got):
            return False
    if failed and any(_is_wrong(gm, model, more, failed) for more in example.of_other_batches()):
        return False
    for node in failed:
        erase(node, _is_number)
    gm.recompile()
    return True


def _is_wrong(gm: fx.GraphModule, model: nn.Module, example: ExampleCall, waived: set[fx.Node]) -> bool:
    """Whether a graph does something else than its model on an example without these checks."""
    for training in (False, True):
        got = tried(gm, example, training, model, runner=_past_checks(set(waived), waived))
        if isinstance(got, Exception):
            # It refuses the example by another check.
            continue
        wanted = tried(model, example, training)
        if not isinstance(wanted, Exception) and wanted.difference(got):
            return True
    return False


def insists(gm: fx.GraphModule, model: nn.Module, example: ExampleCall) -> bool:
    """Whether a graph refuses an example by a check that is not waived, such as how often a loop runs.

    A graph that is traced on this example has such a check of the other number, unless a check that may be
    waived has failed before, and it goes another way.
    """
    failed: set[fx.Node] = set()
    result = tried(gm, example, False, model, runner=_past_checks(failed))
    return isinstance(result, AssertionError) and not failed


def _past_checks(failed: set[fx.Node], among: Container[fx.Node] | None = None) -> Runner:
    """A runner that takes a graph past checks that may be waived, or some of them, and adds what fails."""

    def call(gm: Any, example: ExampleCall) -> Any:
        return _Past(gm, failed, among).run_on(example)

    return call


def _is_number(node: fx.Node) -> bool:
    """Whether a node only computes a number from sizes, so that it can go once it has no users."""
    if node.op == "call_method":
        return node.target in LAYOUT or node.target == "item"
    return getattr(node.target, "__module__", "") in NUMBER_HOMES and not acts_in_place(node)


class _Past(Interpreter):
    """Runs a graph past checks of sizes, and notes those that fail."""

    def __init__(self, gm: fx.GraphModule, failed: set[fx.Node], among: Container[fx.Node] | None) -> None:
        super().__init__(gm)
        self.failed = failed
        self._among = among

    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except (AssertionError, RuntimeError):
            if n.meta.get(DECIDES) in (None, How.MADE_PLAIN.value):
                raise
            if self._among is not None and n not in self._among:
                raise
            self.failed.add(n)
