"""Gradients, Jacobians and ensembles by torch.func, beside what backward and a loop give."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.nn import functional

from pdp_fx.policy import MaskPolicy
from pdp_fx.spec import Forward, Rule
from tests.training.nets import RULES, batch, prepared, sgd, training_step

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
every_forward = pytest.mark.parametrize("forward", ["soft", "hard"])
every_mode = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
Parameters = dict[str, Tensor]


def in_the_ramp(rule: Rule, training: bool = True, forward: Forward = "soft") -> nn.Module:
    """A model of which a part is masked, with batch norms that keep their statistics."""
    model = prepared(rule, forward=forward)
    optimizer = sgd(model)
    for seed in range(3):
        training_step(model, optimizer, seed)
    model.eval()
    for module in model.modules():
        if isinstance(module, MaskPolicy):
            module.train(training)
    return model


def loss(model: nn.Module, parameters: Parameters, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional_call(model, parameters, (images,)), labels)


def detached(model: nn.Module) -> Parameters:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def gradients(model: nn.Module) -> Parameters:
    model.zero_grad()
    images, labels = batch(7)
    functional.cross_entropy(model(images), labels).backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@every_rule
@every_forward
@every_mode
def test_gradients_are_those_of_backward(rule: Rule, forward: Forward, training: bool) -> None:
    model = in_the_ramp(rule, training, forward)
    found = grad(lambda parameters: loss(model, parameters, *batch(7)))(detached(model))
    torch.testing.assert_close(found, gradients(model), rtol=1e-4, atol=1e-6)


@every_rule
def test_gradients_of_single_examples_have_the_gradient_of_the_batch_as_their_mean(rule: Rule) -> None:
    model = in_the_ramp(rule)

    def of_one(parameters: Parameters, image: Tensor, label: Tensor) -> Tensor:
        return loss(model, parameters, image[None], label[None])

    found = vmap(grad(of_one), (None, 0, 0))(detached(model), *batch(7))
    means = {name: gradient.mean(0) for name, gradient in found.items()}
    torch.testing.assert_close(means, gradients(model), rtol=1e-4, atol=1e-6)


@every_rule
@every_forward
def test_gradients_of_several_losses_at_once_are_those_of_each(rule: Rule, forward: Forward) -> None:
    model = in_the_ramp(rule, forward=forward)
    images, labels = batch(7)
    losses = functional.cross_entropy(model(images), labels, reduction="none")[:3]
    weights = list(model.parameters())
    each = [torch.autograd.grad(one, weights, retain_graph=True) for one in losses]
    found = torch.autograd.grad(losses, weights, torch.eye(3), is_grads_batched=True)
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*each, strict=True))), rtol=1e-4, atol=1e-6)


# torch writes some rules of jvp in TorchScript, which it has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
@every_rule
def test_a_derivative_along_a_direction_is_that_of_backward(rule: Rule) -> None:
    model = in_the_ramp(rule)
    point = detached(model)
    direction = {name: torch.randn_like(tensor) for name, tensor in point.items()}
    slope = jvp(lambda parameters: loss(model, parameters, *batch(7)), (point,), (direction,))[1]
    expected = sum((direction[name] * gradient).sum() for name, gradient in gradients(model).items())
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-5)


@every_rule
@every_mode
def test_an_ensemble_runs_as_its_models_do(rule: Rule, training: bool) -> None:
    models = [in_the_ramp(rule, training)]
    models.append(copy.deepcopy(models[0]))
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    # Every graph module has a class of its own, and only copies of one class can be stacked.
    models[1].__class__ = models[0].__class__
    parameters, buffers = stack_module_state(models)
    images = batch(7)[0]

    def run(parameters: Parameters, buffers: Parameters) -> Tensor:
        return functional_call(models[0], (parameters, buffers), (images,))

    outputs = vmap(run)(parameters, buffers)
    for model, found in zip(models, outputs, strict=True):
        torch.testing.assert_close(found, model(images), rtol=1e-4, atol=1e-5)
