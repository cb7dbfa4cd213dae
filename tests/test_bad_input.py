import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

import pdp_fx
from pdp_fx import (
    NM,
    Channels,
    PruneSpec,
    SpecError,
    StateError,
    TraceError,
    Unstructured,
)
from tests.nets import (
    RULES,
    ConvNet,
    Mlp,
    assert_unchanged,
    at_once,
    snapshot,
)


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.name)(x)


def nan_net() -> nn.Module:
    model = Mlp()
    model.fc2.weight.data[3, 3] = float("nan")
    return model


def infinite_net() -> nn.Module:
    model = Mlp()
    model.fc1.bias.data[3] = float("inf")
    return model


def packed_net() -> nn.Module:
    model = Mlp()
    weight = model.fc2.weight.detach()
    model.fc2.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    return model


ROWS = torch.randn(2, 8)
REFUSED = {
    "nothing prunable": (
        nn.ReLU,
        at_once(RULES["unstructured"]),
        ROWS,
        SpecError,
        "no conv or linear weight",
    ),
    "nothing prunable by this rule": (
        lambda: nn.Linear(3, 3),
        at_once(NM(2, 4)),
        None,
        SpecError,
        "can be pruned by this spec:\n  weight: 3 input channels do not divide into groups of 4",
    ),
    "only outputs": (
        lambda: nn.Linear(8, 3),
        at_once(Channels(ratio=0.5)),
        ROWS,
        SpecError,
        "the model returns these channels",
    ),
    "nan": (nan_net, at_once(Unstructured(0.5)), ROWS, SpecError, "fc2.weight holds NaN or infinite values"),
    "infinite": (infinite_net, at_once(Unstructured(0.5)), None, SpecError, "fc1.bias holds NaN or infinite"),
    "needed and missing": (
        Mlp,
        at_once(Channels(ratio=0.5)),
        None,
        SpecError,
        "Channels needs example_inputs",
    ),
    "needed by an override": (
        Mlp,
        at_once(Unstructured(0.5), {"fc1": Channels(ratio=0.5)}),
        None,
        SpecError,
        "Channels needs example_inputs",
    ),
    "wrong shape": (Mlp, at_once(Unstructured(0.5)), torch.randn(2, 9), TraceError, "mat1 and mat2 shapes"),
    "wrong kind": (
        Mlp,
        at_once(Unstructured(0.5)),
        [[1.0]],
        TraceError,
        "must be a tensor, a tuple .* not list",
    ),
    "too many": (Mlp, at_once(Unstructured(0.5)), (ROWS, ROWS), TraceError, "takes 2 positional arguments"),
    "a rule for a spec": (
        Mlp,
        Unstructured(0.5),
        ROWS,
        SpecError,
        r"needs a PruneSpec, got Unstructured.*write PruneSpec\(Unstructured\(ratio=0.5\)\)",
    ),
    "a number for a spec": (
        Mlp,
        0.5,
        ROWS,
        SpecError,
        r"needs a PruneSpec, got 0.5 .*write PruneSpec\(Unstructured\(0.9\)\)",
    ),
    "no module": (
        lambda: functional.relu,
        at_once(Unstructured(0.5)),
        ROWS,
        SpecError,
        "needs a torch.nn.Module",
    ),
    "a name that is taken": (
        lambda: Named("pdp"),
        at_once(Unstructured(0.5)),
        None,
        StateError,
        "attribute 'pdp'.*rename it",
    ),
    "a name of graph modules": (
        lambda: Named("code"),
        at_once(Unstructured(0.5)),
        None,
        TraceError,
        "a part 'code'.*rename it, or put the model into another",
    ),
    "lazy": (
        lambda: nn.LazyLinear(4),
        at_once(Unstructured(0.5)),
        ROWS,
        StateError,
        "weight has no shape yet",
    ),
    "lazy buffers": (
        lambda: nn.Sequential(nn.Linear(8, 4), nn.LazyBatchNorm1d(affine=False)),
        at_once(Unstructured(0.5)),
        ROWS,
        StateError,
        "1.running_mean has no shape yet",
    ),
    "several devices": (
        lambda: nn.Sequential(nn.DataParallel(Mlp())),
        at_once(Unstructured(0.5)),
        ROWS,
        StateError,
        "wrapped by DataParallel.*wrap what prepare returns",
    ),
    "compiled": (
        lambda: cast(nn.Module, torch.compile(Mlp())),
        at_once(Unstructured(0.5)),
        ROWS,
        StateError,
        "wrapped by OptimizedModule",
    ),
    "rules for nothing": (
        lambda: nn.Sequential(nn.Linear(8, 4), nn.ReLU()),
        PruneSpec(None, {nn.ReLU: Unstructured(0.5)}),
        ROWS,
        SpecError,
        "by this spec:\n  its rules name no weight of a conv or linear layer, nor several channels of one",
    ),
    "meta": (
        lambda: Mlp().to("meta"),
        at_once(Unstructured(0.5)),
        ROWS,
        StateError,
        r"weight is on the meta device.*to_empty",
    ),
    "quantised": (
        packed_net,
        at_once(Unstructured(0.5)),
        ROWS,
        StateError,
        "fc2.weight is of type TwoTensor.*quantise what convert returns",
    ),
    "an unmatched override": (
        Mlp,
        at_once(Unstructured(0.5), {"fc4": None}),
        ROWS,
        SpecError,
        "'fc4'; did you mean 'fc",
    ),
    "more than may go": (
        Mlp,
        at_once(Unstructured(0.999)),
        ROWS,
        SpecError,
        "lower the ratio, min_keep or min_channels",
    ),
    "min_channels keeps all": (
        Mlp,
        at_once(Channels(ratio=0.5, min_channels=99)),
        ROWS,
        SpecError,
        "nothing would be pruned.*min_channels",
    ),
    "macs out of reach": (
        ConvNet,
        at_once(Channels(mac_reduction=0.99)),
        torch.randn(1, 3, 8, 8),
        SpecError,
        r"mac_reduction=0.99 cannot be reached: removing every channel that may go saves 0\.\d+",
    ),
    "compiled model": (
        lambda: torch.jit.trace(nn.Linear(8, 8), ROWS),
        at_once(Unstructured(0.5)),
        ROWS,
        SpecError,
        "compiled by TorchScript; prepare the Python model",
    ),
    "exported model": (
        lambda: torch.export.export(Mlp(), (ROWS,)).module(),
        at_once(Unstructured(0.5)),
        ROWS,
        TraceError,
        "cannot change between training and evaluation: .*prepare the Python model and export",
    ),
    "no example": (Mlp, at_once(Unstructured(0.5)), ROWS[:0], TraceError, "give at least one example"),
    "nested example": (
        Mlp,
        at_once(Unstructured(0.5)),
        torch.nested.nested_tensor([ROWS, ROWS[:1]], layout=torch.jagged),
        TraceError,
        "an example input is a nested tensor",
    ),
    "two mac targets": (
        Mlp,
        at_once(Channels(mac_reduction=0.3), {"fc1": Channels(mac_reduction=0.4)}),
        ROWS,
        SpecError,
        "two different mac_reduction targets",
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("make", "spec", "inputs", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_with_a_clear_error(
    make: Callable[[], nn.Module], spec: PruneSpec, inputs: Tensor, kind: type[Exception], message: str
) -> None:
    model = make()
    before = snapshot(model) if isinstance(model, Mlp) and kind is not StateError else None
    with pytest.raises(kind, match=f"(?s){message}"):
        pdp_fx.prepare(model, spec, inputs)
    if before is not None:
        assert_unchanged(model, before)


def test_a_prepared_model_is_not_prepared_again() -> None:
    x = torch.randn(2, 8)
    prepared = pdp_fx.prepare(Mlp(), PruneSpec(Unstructured(0.5)), x)
    for model in (prepared, nn.Sequential(prepared), copy.deepcopy(prepared)):
        with pytest.raises(StateError, match="prepared already; call convert"):
            pdp_fx.prepare(model, PruneSpec(Unstructured(0.5)), x)


def test_step_and_convert_need_a_prepared_model() -> None:
    for verb in (pdp_fx.step, pdp_fx.convert):
        with pytest.raises(
            StateError, match=rf"{verb.__name__}\(model\) needs a model that came from pdp_fx.prepare"
        ):
            verb(Mlp())
        with pytest.raises(StateError, match=r"must be a torch.nn.Module, got 3 \(int\)"):
            verb(3)  # pyright: ignore[reportArgumentType]


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "prepare, on_pass": (
        lambda wrong: pdp_fx.prepare(Mlp(), at_once(Unstructured(0.5)), ROWS, wrong),
        "prepare: on_pass must be a function, got",
    ),
    "convert, on_pass": (
        lambda wrong: pdp_fx.convert(Mlp(), wrong),
        "convert: on_pass must be a function, got",
    ),
    "from_toml": (PruneSpec.from_toml, "from_toml needs a text, got .*load reads a file"),
    "load": (PruneSpec.load, "load needs the path of a file, got"),
    "graph_diff": (lambda wrong: pdp_fx.graph_diff(wrong, wrong), "graph_diff needs the text of a graph"),
}


@pytest.mark.parametrize("wrong", [3, [], {}], ids=repr)
@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_an_argument_of_a_wrong_type_is_named(
    call: Callable[[Any], object], message: str, wrong: object
) -> None:
    with pytest.raises(SpecError, match=message):
        call(wrong)


@pytest.mark.parametrize("verb", [pdp_fx.report, pdp_fx.print_graph])
def test_what_reads_numbers_refuses_a_prepared_model_on_the_meta_device(
    verb: Callable[[Any], object],
) -> None:
    model = pdp_fx.prepare(Mlp(), at_once(Channels(ratio=0.5)), ROWS).to("meta")
    with pytest.raises(StateError, match=rf"{verb.__name__}\(model\) reads .*fc1.weight is on the meta"):
        verb(model)


@pytest.mark.parametrize("rule", [Unstructured(0.5), NM(2, 4), Channels(ratio=0.5)], ids=str)
def test_a_prepared_model_says_why_it_is_not_traced_symbolically(rule: Unstructured | NM | Channels) -> None:
    model = pdp_fx.prepare(Mlp(), at_once(rule), ROWS)
    with pytest.raises(StateError, match="before prepare, or to what convert returns"):
        fx.symbolic_trace(model)
    pdp_fx.step(model)
    small = pdp_fx.convert(model)
    assert torch.equal(fx.symbolic_trace(small)(ROWS), small(ROWS))
