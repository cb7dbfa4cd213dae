"""The workloads of `overhead.py`, and every way of training them that it compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torchvision  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor, nn
from torch.nn import functional

import pdp_fx
from benchmarks.gpt2 import GPT2, Config
from benchmarks.resnet_cifar import ResNet20
from benchmarks.rivals import CS, SRSTE, STR, Fixed, OptG
from pdp_fx import NM, Channels, MaskSite, PruneSpec, Schedule, Unstructured
from pdp_fx.spec import Rule

METHODS = (
    "dense", "pdp", "pdp-nm", "pdp-channels", "pdp-hard", "pdp-nm-hard-decay", "fixed", "optg", "cs", "str",
    "sr-ste",
)  # fmt: skip
RATIO = 0.85


@dataclass(frozen=True)
class Workload:
    """A model with the batch it is trained on.

    Attributes:
        make: builds the model.
        batch: examples in a batch.
        shape: of one example; one number means that many token ids.
        classes: the number of labels, or of tokens.
    """

    make: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    classes: int = 1000

    def example(self, batch: int, device: str) -> tuple[Tensor, Tensor]:
        """A batch of inputs and labels."""
        generator = torch.Generator().manual_seed(0)
        if len(self.shape) == 1:
            tokens = torch.randint(0, 50257, (batch, self.shape[0] + 1), generator=generator).to(device)
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        images = torch.randn(batch, *self.shape, generator=generator).to(device)
        return images, torch.randint(0, self.classes, (batch,), generator=generator).to(device)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD with momentum for images, AdamW for tokens; at rate 0 a long run stays where it is."""
        if len(self.shape) == 1:
            return torch.optim.AdamW(parameters, 0.0, weight_decay=0.1)
        return torch.optim.SGD(parameters, 0.0, momentum=0.9, weight_decay=1e-4)


def _torchvision(name: str) -> nn.Module:
    return torchvision.models.get_model(name, weights=None)


WORKLOADS = {
    "resnet20": Workload(ResNet20, 128, (3, 32, 32), 10),
    "resnet18": Workload(partial(_torchvision, "resnet18"), 64, (3, 224, 224)),
    "resnet50": Workload(partial(_torchvision, "resnet50"), 32, (3, 224, 224)),
    "mobilenet_v2": Workload(partial(_torchvision, "mobilenet_v2"), 32, (3, 224, 224)),
    "gpt2-block": Workload(lambda: GPT2(Config(positions=128, layers=3)), 12, (128,)),
    "gpt2-small": Workload(lambda: GPT2(Config()), 8, (1024,)),
}


@dataclass
class Variant:
    """A model as one method trains it.

    Attributes:
        model: what is called.
        own: the parameters that the method adds.
        penalised: whether the method adds a term to the loss.
    """

    model: nn.Module
    own: list[nn.Parameter]
    penalised: bool = False

    def loss(self, inputs: Tensor, labels: Tensor, precision: str) -> Tensor:
        """The loss of one batch."""
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == "bf16"):
            outputs = self.model(inputs)
            loss = functional.cross_entropy(outputs.flatten(0, -2).float(), labels.flatten())
        return loss + pdp_fx.penalty(self.model) if self.penalised else loss


def build(method: str, dense: nn.Module, example: Tensor) -> Variant:
    """The model ``dense`` as ``method`` trains it, sharing its parameters; every mask is half of the way."""
    if method == "dense":
        return Variant(dense, [])
    tied = {"lm_head": None} if isinstance(dense, GPT2) else {}
    schedule = Schedule(0, 0.5, "epoch", length=4)
    spec = PruneSpec(_rule(method), tied, schedule, **OPTIONS.get(method, {}))
    model = pdp_fx.prepare(dense, spec, example[:2])
    pdp_fx.step(model)
    own = list({*model.parameters()} - {*dense.parameters()})
    return Variant(model, own, penalised=method in ("cs", "pdp-nm-hard-decay"))


OPTIONS: dict[str, dict[str, Any]] = {
    "pdp-hard": {"forward": "hard"},
    "pdp-nm-hard-decay": {"forward": "hard", "pruned_decay": 2e-4},
}
"""What a method's spec says beside its rule."""


def _rule(method: str) -> Rule:
    """The rule of a method; a mask that can be half of the way has a full ratio of `RATIO`."""
    rules: dict[str, Rule] = {
        "pdp": Unstructured(RATIO),
        "pdp-nm": NM(2, 4),
        "pdp-channels": Channels(ratio=0.4),
        "pdp-hard": Unstructured(RATIO),
        "pdp-nm-hard-decay": NM(2, 4),
        "fixed": Unstructured(RATIO / 2, policy=Fixed),
        "optg": Unstructured(RATIO / 2, policy=OptG),
        "cs": Unstructured(RATIO, policy=partial(CS, start=-1.0)),
        "str": Unstructured(RATIO, policy=_str_half_way),
        "sr-ste": NM(2, 4, policy=SRSTE),
    }
    return rules[method]


def _str_half_way(site: MaskSite) -> STR:
    """STR with a score that prunes half of the ratio now."""
    magnitude = site.weight.detach().abs().flatten()
    threshold = float(magnitude.kthvalue(max(round(RATIO / 2 * magnitude.numel()), 1)).values)
    return STR(site, float(torch.logit(torch.tensor(threshold, dtype=torch.float64), eps=1e-12)))
