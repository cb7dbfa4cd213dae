"""The pass protocol, and the pipeline that runs passes.

A pass edits a graph; the pipeline does everything around it: it checks what a pass requires and
ensures, removes reads of parameters that have no users, lints, recompiles, and logs what happened.
The passes are in `pdp_fx.passes`, one in each file.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import fx, nn

from pdp_fx.errors import PassError, PdpError
from pdp_fx.spec import PruneSpec
from pdp_fx.tracing.examples import Inputs

Fact = TypeVar("Fact")

_log = logging.getLogger(__name__)


@dataclass
class Context:
    """What the passes of one pipeline run share.

    Attributes:
        spec: what the user asked for.
        example_inputs: the positional and keyword arguments the graph is run on, or None.
        modules: the user's modules by name, for matching the spec's overrides.
        facts: results that one pass leaves for later passes, by the type of the result.
    """

    spec: PruneSpec
    example_inputs: Inputs | None = None
    modules: dict[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    facts: dict[type, Any] = field(default_factory=dict[type, Any])

    def put(self, fact: object) -> None:
        """Leave ``fact`` for later passes; a second one of its type replaces the first."""
        self.facts[type(fact)] = fact

    def get(self, kind: type[Fact]) -> Fact:
        """Return the fact of type ``kind``.

        Raises:
            PassError: no earlier pass has left one.
        """
        if kind not in self.facts:
            raise PassError(f"no earlier pass has left a {kind.__name__}; the pipeline's order is wrong")
        return self.facts[kind]

    def find(self, kind: type[Fact]) -> Fact | None:
        """Return the fact of type ``kind``, or None."""
        return self.facts.get(kind)


@dataclass(frozen=True)
class Pass(ABC):
    """One rewrite or analysis of a graph. Subclasses are frozen; their options are fields.

    The graph is valid before and after ``run``, not necessarily while it runs. The pipeline, and never a
    pass, removes dead reads, lints and recompiles. It recompiles after the last pass, and before a pass
    that calls ``gm``.

    Attributes:
        name: the name that users see, in kebab-case.
        calls: whether the pass calls ``gm`` itself, which needs generated code, rather than interpreting
            its graph.
    """

    name: ClassVar[str]
    calls: ClassVar[bool] = False

    def requires(self, gm: fx.GraphModule, ctx: Context) -> None:
        """Raise PassError when ``gm`` is not in the form that this pass reads."""

    @abstractmethod
    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        """Edit ``gm`` in place and return True exactly if something was edited."""

    def ensures(self, gm: fx.GraphModule, ctx: Context) -> None:
        """Raise PassError when the result is not what this pass promises."""


OnPass = Callable[[str, Pass, fx.GraphModule], None]
"""Called after each pass with the graph's text before it, the pass, and the graph module."""


@dataclass(frozen=True)
class Pipeline:
    """Passes in the order in which they run."""

    passes: tuple[Pass, ...]

    def run(self, gm: fx.GraphModule, ctx: Context, on_pass: OnPass | None = None) -> None:
        """Run every pass on ``gm`` in place.

        Args:
            gm: the graph module to edit.
            ctx: shared by all passes.
            on_pass: called after each pass with the graph's text before it, the pass, and ``gm``.

        Raises:
            PassError: a pass failed; the message names the pass, and the printed graph is a note. Other
                errors of this package go through unchanged, with the same note.
        """
        is_stale = False
        for step in self.passes:
            if is_stale and step.calls:
                gm.recompile()
                is_stale = False
            is_stale |= self._run_one(step, gm, ctx, on_pass)
        if is_stale:
            gm.recompile()

    def _run_one(self, step: Pass, gm: fx.GraphModule, ctx: Context, on_pass: OnPass | None) -> bool:
        """Run one pass, and return whether it has edited the graph."""
        before_text = str(gm.graph) if on_pass is not None else ""
        before = len(gm.graph.nodes)
        started = time.perf_counter()
        try:
            step.requires(gm, ctx)
            modified = step.run(gm, ctx)
            if modified:
                tidy(gm)
            step.ensures(gm, ctx)
        except PdpError as err:
            err.add_note(f"in pass '{step.name}' on\n{gm.graph}")
            raise
        except Exception as err:
            wrapped = PassError(f"pass '{step.name}' failed: {type(err).__name__}: {err}")
            wrapped.add_note(str(gm.graph))
            raise wrapped from err
        if on_pass is not None:
            gm.recompile()
            on_pass(before_text, step, gm)
        _log.debug(
            "%s: %d nodes, then %d, %.3f s",
            *(step.name, before, len(gm.graph.nodes), time.perf_counter() - started),
        )
        return modified


def tidy(gm: fx.GraphModule) -> None:
    """Lint the graph, as `eliminate_dead_code` does first, and remove reads of parameters without users.

    Only ``get_attr`` nodes can be dropped safely: in a user's graph a call without users may still
    act in place or draw random numbers.
    """
    gm.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
