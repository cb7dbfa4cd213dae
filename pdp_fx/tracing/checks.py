"""What a graph checks at each call: what the model decided by sizes and numbers is decided alike."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from pdp_fx.tracing.shapes import check_step
from pdp_fx.tracing.source import source_line
from pdp_fx.tracing.steps import (
    Expr,
    How,
    NumberReadError,
    Step,
    Value,
    identity,
    is_data,
    is_given,
    is_ragged,
    is_read,
    selectors,
    varies,
)

if TYPE_CHECKING:
    from pdp_fx.tracing.recorder import Recorder


class Checks:
    """Adds checks to a recording, each once.

    Args:
        recorder: makes the recording.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._decided: set[Hashable] = set()
        self._held: set[Hashable] = set()

    def decided(self, fact: Expr, how: How = How.COMPARED, check: Callable[..., Any] = torch._assert) -> None:
        """Add a check that a comparison of sizes, by which the model's code decided, has the same result.

        Sizes that depend on data differ from call to call, so a decision by them is refused, unless it asks
        whether a size equals a plain number: such a size, as of an axis of coordinates, may be constant. A
        model that would be refused as a whole is tried with checks of these, too. A decision by a number that
        is read from a tensor is always refused.

        Args:
            fact: the comparison, as it came out in this run.
            how: how the code goes by it.
            check: what checks it, one of `steps.CHECKS`.
        """
        recorder, known = self._recorder, identity(fact)
        noted = self._held if how is How.MADE_PLAIN else self._decided
        done = known in self._held or known in noted
        if recorder.inside or done or is_data(fact) or not self._may_change(fact):
            return
        noted.add(known)
        if is_read(fact):
            recorder.guarded(refuse_ragged, "decides by", fact)
            return
        on_purpose = how is How.COMPARED_WITH_NUMBER and fact.call in (operator.eq, operator.ne)
        if is_ragged(fact) and not on_purpose:
            recorder.findings.met_ragged = True
            if not recorder.findings.checks_ragged:
                recorder.guarded(refuse_ragged, "decides by", fact)
                return
        source = source_line()
        said = "sizes"
        if is_given(fact):
            # Other sizes do not show whether it matters.
            said, how = "numbers", How.MADE_PLAIN
        message = (
            f"{source} decides by {said}, and by these otherwise than in this graph; "
            f"trace with example_inputs of such {said}"
        )
        checked = Step("call_function", check, (fact, message), {}, recorder.scope, source, decides=how)
        recorder.steps.append(checked)

    def hold(self, value: Value, found: Any, message: str) -> None:
        """Add a check, failing with ``message``, that a value equals what was found in this run."""
        fact = identity(Expr(operator.eq, (value, found)))
        recorder = self._recorder
        if not recorder.inside and fact not in self._held:
            self._held.add(fact)
            recorder.steps.append(check_step([(value, found)], message, recorder.scope, source_line()))

    def _may_change(self, fact: Expr) -> bool:
        """Whether a comparison may come out differently in another run: its operands differ, and may."""
        return len({identity(arg) for arg in fact.args}) > 1 and any(map(self.may_differ, fact.args))

    def may_differ(self, value: Value) -> bool:
        """Whether a number may be another one in another run."""
        return varies(value) or is_read(value) or (is_ragged(value) and self._follows_floats(value))

    def _follows_floats(self, value: Value) -> bool:
        """Whether a size depends on the floating-point numbers in a parameter or buffer, which may change.

        Masks and indices that a model stores stay what they are.
        """
        return any(self._floats.get(each.path, False) for each in selectors(value))

    @cached_property
    def _floats(self) -> dict[str, bool]:
        """By the names of all parameters and buffers, whether they are floating-point."""
        model = self._recorder.model
        named = (*model.named_parameters(), *model.named_buffers())
        return {path: tensor.is_floating_point() for path, tensor in named}

    def insist(self, value: Value, number: Any) -> None:
        """Let the graph insist on a number that Python takes for a plain one."""
        fact = Expr(operator.eq, (value, number))
        if is_read(value) or is_ragged(value):
            self.decided(fact)
            return
        source = source_line()
        self.hold(
            value,
            number,
            f"{source} reads a size, and the model computes another thing by a number that Python makes of "
            "it, as by ratios[0] * size (but not size * ratios[0]) or ratios[size]; trace with "
            "example_inputs of the size you need",
        )


def refuse_ragged(what: str, value: Value) -> None:
    """Refuse that the model uses a size or number that depends on data for more than arithmetic."""
    kind = "a number in a tensor" if is_read(value) else "a size that depends on the numbers in a tensor"
    raise NumberReadError(f"{what} {kind}", None)
