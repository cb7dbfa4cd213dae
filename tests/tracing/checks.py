"""What every traced model has to keep: the same results in both modes, the same names, the same objects."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from pdp_fx.trace import trace
from pdp_fx.tracing.preserve import preserved, unwritten
from pdp_fx.tracing.structure import fresh_copy, tensors

Example = Tensor | tuple[Any, ...] | dict[str, Any]


class Around(nn.Module):
    """One module between two layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)))


class Computes(nn.Module):
    """A function as a model."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


def call(model: Callable[..., Any], example: Example) -> Any:
    """Call a model on copies of example inputs."""
    inputs = fresh_copy(example)
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def under(dtype: torch.dtype, call: Callable[..., Any], x: Tensor) -> Tensor:
    """What a call gives under autocast to a dtype."""
    with torch.autocast("cpu", dtype):
        result: Tensor = call(x)
    return result


def outcome(model: nn.Module, example: Example, training: bool) -> tuple[Any, list[Tensor]]:
    """What a run gives: the output; and its tensors, the buffers, the gradients and the generator's state."""
    with unwritten(model), preserved(model):
        model.train(training)
        torch.manual_seed(1)
        output = call(model, example)
        found = list(tensors(output))
        loss = sum((t.float() ** 2).sum() for t in found if t.requires_grad)
        if isinstance(loss, Tensor):
            loss.backward()
        named = dict(model.named_parameters())
        found += [torch.zeros_like(p) if p.grad is None else p.grad for p in named.values()]
        found += [
            buffer.clone()
            for name, buffer in model.named_buffers()
            if not name.startswith("_tensor_constant")
        ]
        model.zero_grad(set_to_none=True)
        return output, [*(t.detach() for t in found), torch.get_rng_state()]


def assert_same(gm: nn.Module, model: nn.Module, example: Example) -> None:
    """Both models act the same in both modes, bit for bit."""
    for training in (False, True):
        output, wanted = outcome(model, example, training)
        traced, got = outcome(gm, example, training)
        assert type(traced) is type(output)
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def assert_same_state(gm: nn.Module, model: nn.Module) -> None:
    """Both models have the same names in the same order, the same parameters and buffers, the same flag."""
    assert list(gm.state_dict()) == list(model.state_dict())
    wanted, got = dict(model.named_parameters()), dict(gm.named_parameters())
    assert list(got) == list(wanted)
    assert all(got[name] is wanted[name] for name in wanted)
    buffers = dict(gm.named_buffers())
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
    assert gm.training == model.training


def exact(model: nn.Module, example: Example, *others: Example) -> fx.GraphModule:
    """Trace a model and check all that is promised of the graph; `others` are more inputs to compare on."""
    flags = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = [dict(vars(module)) for module in model.modules()]
    generator = torch.get_rng_state()
    gm = trace(model, example)
    gm.graph.lint()
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    for module, before in zip(model.modules(), attributes, strict=True):
        assert {name: id(value) for name, value in vars(module).items()} == {
            name: id(value) for name, value in before.items()
        }
    assert_same_state(gm, model)
    for inputs in (example, *others):
        assert_same(gm, model, inputs)
    return gm


def targets(gm: fx.GraphModule) -> list[str]:
    """The targets of a graph's nodes, without placeholders and output."""
    kept = (node for node in gm.graph.nodes if node.op not in ("placeholder", "output"))
    return [node.target if isinstance(node.target, str) else node.target.__name__ for node in kept]


def opaque(gm: fx.GraphModule) -> Mapping[str, str]:
    """The modules and methods kept whole, with the reasons."""
    return {str(node.target): node.meta["opaque"] for node in gm.graph.nodes if "opaque" in node.meta}
