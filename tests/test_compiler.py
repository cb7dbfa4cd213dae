import operator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import fx, nn

from pdp_fx import Unstructured
from pdp_fx.compiler import Context, Pass, Pipeline, tidy
from pdp_fx.errors import PassError, SpecError, VerifyError
from tests.nets import at_once, listing


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1) * self.scale


@dataclass(frozen=True)
class Double(Pass):
    """Replaces every addition by one of twice the constant."""

    name: ClassVar[str] = "double"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        nodes = gm.graph.find_nodes(op="call_function", target=operator.add)
        for node in nodes:
            node.args = (node.args[0], 2 * node.args[1])
        ctx.put(Count(len(nodes)))
        return bool(nodes)


@dataclass(frozen=True)
class Count:
    """How many additions were found."""

    additions: int


@dataclass(frozen=True)
class Fail(Pass):
    """Raises what it is given, at the place it is given."""

    name: ClassVar[str] = "fail"
    error: Exception
    where: str = "run"

    def requires(self, gm: fx.GraphModule, ctx: Context) -> None:
        self._maybe("requires")

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        self._maybe("run")
        return False

    def ensures(self, gm: fx.GraphModule, ctx: Context) -> None:
        self._maybe("ensures")

    def _maybe(self, place: str) -> None:
        if place == self.where:
            raise self.error


def tiny() -> tuple[fx.GraphModule, Context]:
    return fx.symbolic_trace(Tiny()), Context(at_once(Unstructured(0.5)))


def test_passes_run_in_order_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "pdp_fx.compiler")
    gm, ctx = tiny()
    Pipeline((Double(), Fail(ValueError(), "never"), Double())).run(gm, ctx)
    lines = [record.getMessage().rpartition(",")[0] for record in caplog.records]
    assert lines == ["double: 5 nodes, then 5", "fail: 5 nodes, then 5", "double: 5 nodes, then 5"]
    assert torch.equal(gm(torch.zeros(3)), torch.full((3,), 4.0))


@dataclass(frozen=True)
class Call(Pass):
    """Leaves what the module gives."""

    name: ClassVar[str] = "call"
    calls: ClassVar[bool] = True

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        ctx.put(gm(torch.zeros(3)))
        return False


def test_a_pass_that_calls_the_module_meets_the_graph_as_it_is() -> None:
    gm, ctx = tiny()
    Pipeline((Double(), Call(), Double())).run(gm, ctx)
    assert torch.equal(ctx.get(torch.Tensor), torch.full((3,), 2.0))
    assert torch.equal(gm(torch.zeros(3)), torch.full((3,), 4.0))


def test_the_callback_sees_the_graph_before_and_after_every_pass() -> None:
    gm, ctx = tiny()
    seen: list[tuple[bool, str]] = []

    def note(before: str, step: Pass, after: fx.GraphModule) -> None:
        seen.append((before == str(after.graph), step.name))

    Pipeline((Double(), Fail(ValueError(), "never"))).run(gm, ctx, note)
    assert seen == [(False, "double"), (True, "fail")]


@pytest.mark.parametrize("where", ["requires", "run", "ensures"])
def test_a_failure_names_the_pass_and_shows_the_graph(where: str) -> None:
    gm, ctx = tiny()
    with pytest.raises(PassError, match="pass 'fail' failed: ValueError: no luck") as error:
        Pipeline((Fail(ValueError("no luck"), where),)).run(gm, ctx)
    assert isinstance(error.value.__cause__, ValueError)
    assert "placeholder" in error.value.__notes__[0]


@pytest.mark.parametrize("kind", [SpecError, VerifyError, PassError])
def test_our_own_errors_go_through_with_the_graph_as_a_note(kind: type[Exception]) -> None:
    gm, ctx = tiny()
    with pytest.raises(kind, match="as it is") as error:
        Pipeline((Fail(kind("as it is")),)).run(gm, ctx)
    assert error.value.__notes__[0].startswith("in pass 'fail' on\ngraph():")


@dataclass(frozen=True)
class Orphan(Pass):
    """Leaves a read that nobody uses, and a call that nobody uses."""

    name: ClassVar[str] = "orphan"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        x = next(iter(gm.graph.nodes))
        with gm.graph.inserting_after(x):
            gm.graph.call_method("add_", (x, 1))
            gm.graph.get_attr("scale")
        return True


def test_unused_reads_go_but_calls_may_act_and_stay() -> None:
    gm, ctx = tiny()
    Pipeline((Orphan(),)).run(gm, ctx)
    assert listing(gm).splitlines() == [
        "x = input",
        "add_ = .add_(x, 1)",
        "add = add(x, 1)",
        "scale = scale",
        "mul = mul(add, scale)",
    ]
    before = listing(gm)
    tidy(gm)
    gm.recompile()
    assert listing(gm) == before


@dataclass(frozen=True)
class Break(Pass):
    """Leaves a graph that calls a module that is not there."""

    name: ClassVar[str] = "break"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        node = gm.graph.find_nodes(op="get_attr")[0]
        node.target = "nowhere.weight"
        return True


def test_an_invalid_graph_is_caught_right_behind_its_pass() -> None:
    gm, ctx = tiny()
    with pytest.raises(PassError, match="pass 'break' failed"):
        Pipeline((Break(), Double())).run(gm, ctx)


def test_facts_are_kept_by_type() -> None:
    gm, ctx = tiny()
    assert ctx.find(Count) is None
    with pytest.raises(PassError, match="no earlier pass has left a Count"):
        ctx.get(Count)
    Pipeline((Double(),)).run(gm, ctx)
    assert ctx.get(Count) == Count(1)
    ctx.put(Count(7))
    assert ctx.find(Count) == Count(7)


def test_a_pass_prints_and_compares_by_its_options() -> None:
    assert str(Double()) == "Double()"
    assert Double() == Double()
