"""Tiny nets, and the few lines that most tests need: prepare, train a little, compare, list a graph."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import pdp_fx
from pdp_fx import NM, Channels, PruneSpec, Schedule, Unstructured
from pdp_fx.compiler import Context, Pipeline
from pdp_fx.example_inputs import matching, normalised
from pdp_fx.granularity import Rule
from pdp_fx.ops.kinds import named_modules
from pdp_fx.overrides import Overrides
from pdp_fx.passes import CONVERT, PREPARE
from pdp_fx.planning import parameters_of
from pdp_fx.policy import MaskPolicy
from pdp_fx.pruner import CHILD, Pruner
from pdp_fx.spec import Allocation
from pdp_fx.trace import trace

Net = TypeVar("Net", bound=nn.Module)

AT_ONCE = Schedule(start=0, epsilon=1.0)
"""One call of `step` is the full target."""

RULES: dict[str, Rule] = {"unstructured": Unstructured(0.7), "n:m": NM(2, 4), "channels": Channels(ratio=0.5)}
"""One rule of each granularity."""


class ConvNet(nn.Module):
    """Two conv-BatchNorm pairs, pooling, a classifier; images (n, 3, 8, 8) to (n, 5)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, width, 3, stride=2)
        self.bn2 = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


class Residual(nn.Module):
    """A stem, a residual block with a depthwise conv, a classifier; images (n, 3, 8, 8) to (n, 5)."""

    def __init__(self, channels: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        )
        self.expand = nn.Sequential(
            nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6()
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.SiLU(),
        )
        self.project = nn.Sequential(nn.Conv2d(hidden, channels, 1, bias=False), nn.BatchNorm2d(channels))
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.project(self.depthwise(self.expand(x))))
        return self.fc(self.dropout(x.mean((2, 3))))


class Mlp(nn.Module):
    """Two hidden layers without BatchNorm; rows (n, 8) to (n, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 12)
        self.fc3 = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(torch.tanh(self.fc2(functional.relu(self.fc1(x)))))


class Tied(nn.Module):
    """One weight used by two layers; rows (n, 8) to (n, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.encoder = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 8)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.stem(x))
        return self.head(self.decoder(functional.relu(self.encoder(x))))


class Small(nn.Module):
    """A conv with BatchNorm, and a head: the net of golden texts; images (2, 3, 6, 6) to (2, 2, 4, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.bn(self.conv(x))))


IMAGES = (4, 3, 8, 8)
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (ConvNet, IMAGES),
    "residual": (Residual, IMAGES),
    "mlp": (Mlp, (6, 8)),
    "tied": (Tied, (6, 8)),
    "small": (Small, (2, 3, 6, 6)),
}
"""Each net with the shape of its input."""


def shake(model: Net) -> Net:
    """Give every BatchNorm statistics, scales and shifts that a mistake would show in."""
    generator = torch.Generator().manual_seed(7)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            if module.running_mean is not None and module.running_var is not None:
                module.running_mean.normal_(0, 0.5, generator=generator)
                module.running_var.uniform_(0.5, 1.5, generator=generator)
            if module.affine:
                module.weight.data.uniform_(0.5, 1.5, generator=generator)
                module.bias.data.normal_(0, 0.5, generator=generator)
    return model


def net(name: str) -> tuple[nn.Module, Tensor]:
    """A net of `NETS` and an input for it, the same at every call."""
    make, shape = NETS[name]
    torch.manual_seed(0)
    return shake(make()), torch.randn(shape)


def at_once(
    rule: Rule | None,
    overrides: Overrides = (),
    allocation: Allocation = "global",
    min_keep: float = 0.25,
    tau: float = 1e-4,
) -> PruneSpec:
    """A spec that reaches its target with one `step`."""
    return PruneSpec(rule, overrides, AT_ONCE, tau, allocation, min_keep)


def train(model: nn.Module, x: Tensor, steps: int = 2, lr: float = 0.05) -> None:
    """Steps of gradient descent in train mode."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def pruned(model: nn.Module, rule: Rule | PruneSpec, x: Tensor) -> fx.GraphModule:
    """The model prepared, trained, brought to its full target, and trained on with soft masks."""
    prepared = pdp_fx.prepare(model, rule if isinstance(rule, PruneSpec) else at_once(rule), x)
    train(prepared, x)
    pdp_fx.step(prepared)
    train(prepared, x)
    return prepared


def state(prepared: nn.Module) -> Pruner:
    """The pruning state of a prepared model."""
    return cast(Pruner, prepared.get_submodule(CHILD))


def mask_of(prepared: nn.Module, name: str) -> MaskPolicy:
    """One mask by its name."""
    return dict(state(prepared).mask_items())[name]


def counts(prepared: nn.Module) -> dict[str, int]:
    """How many units the hard mask of each site prunes, counted one by one."""
    items = state(prepared).mask_items()
    return {name: int(mask.pruned(*parameters_of(prepared, mask)).sum()) for name, mask in items}


def difference(model: nn.Module, other: nn.Module, *inputs: Tensor) -> float:
    """The largest difference of the outputs, relative to their scale; both models as they are."""
    with torch.no_grad():
        mine, theirs = tree_leaves(model(*inputs)), tree_leaves(other(*inputs))
    assert [out.shape for out in mine] == [out.shape for out in theirs]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(mine, theirs, strict=True))


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a careless function could change in a model."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    modules = {name: (id(module), type(module), module.training) for name, module in named_modules(model)}
    grads = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    return {"state": state, "tensors": tensors, "modules": modules, "grads": grads}


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    """Check that a model is what it was when its snapshot was taken."""
    now = snapshot(model)
    then = before["state"]
    assert list(now["state"]) == list(then)
    assert all(torch.equal(t.nan_to_num(7), then[name].nan_to_num(7)) for name, t in now["state"].items())
    assert {key: now[key] for key in now if key != "state"} == {
        key: before[key] for key in before if key != "state"
    }


def prepare_until(
    model: nn.Module, spec: PruneSpec, x: Tensor | None, last: str
) -> tuple[fx.GraphModule, Context]:
    """Run the passes of `prepare` up to the one named ``last``."""
    gm, inputs = trace(model, x), normalised(x)
    ctx = Context(spec, inputs, dict(named_modules(model)))
    ctx.put(Pruner(spec, inputs))
    gm.add_submodule(CHILD, ctx.get(Pruner))
    _until(PREPARE, last).run(gm, ctx)
    return gm, ctx


def convert_until(prepared: fx.GraphModule, last: str) -> tuple[fx.GraphModule, Context]:
    """Run the passes of `convert` on a copy, up to the one named ``last``."""
    gm = copy.deepcopy(prepared)
    inputs = state(gm).example_inputs
    ctx = Context(state(gm).spec, None if inputs is None else matching(inputs, gm))
    ctx.put(state(gm))
    _until(CONVERT, last).run(gm, ctx)
    return gm, ctx


def _until(pipeline: Pipeline, last: str) -> Pipeline:
    names = [step.name for step in pipeline.passes]
    return Pipeline(pipeline.passes[: names.index(last) + 1])


def listing(gm: fx.GraphModule) -> str:
    """The graph, one line a node, in a form that does not change with the version of torch."""
    return "\n".join(f"{node.name} = {_call(node)}" for node in gm.graph.nodes if node.op != "output")


def _call(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return str(node.target)
    target: Any = node.target
    name = target if isinstance(target, str) else target.__name__
    arguments = [_text(value) for value in node.args]
    arguments += [f"{key}={_text(value)}" for key, value in node.kwargs.items()]
    return f"{'.' if node.op == 'call_method' else ''}{name}({', '.join(arguments)})"


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(_text(item) for item in cast(list[Any], value))}]"
    return value.name if isinstance(value, fx.Node) else repr(value)
