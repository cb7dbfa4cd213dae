"""Data-parallel training on all ranks of a process group, checked on each rank; started by torchrun.

Every rank trains on its part of each batch, and beside it, alone, on the whole batch. A rank that finds a
difference raises, which makes torchrun fail.
"""

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import pdp_fx
from pdp_fx import MaskPolicy, MaskSite, Progress, PruneSpec, StateError, Unstructured, WeightPolicy
from pdp_fx.planning import parameters_of
from pdp_fx.pruner import Pruner, find
from pdp_fx.sharding import gathered
from tests.training.nets import RAMP, RULES, batch


class Net(nn.Module):
    """No batch norm: its statistics would depend on how a batch is split."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 12, 3, padding=1)
        self.inner = nn.Conv2d(12, 12, 3, padding=1)
        self.head = nn.Linear(12, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (n, 4, h, w) to (n, 10)."""
        stream = torch.relu(self.stem(images))
        return self.head((stream + torch.relu(self.inner(stream))).mean((2, 3)))


class Decaying(WeightPolicy):
    """Ranks by a parameter of its own, which has a penalty, too, and writes to the weights in its update."""

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        self.scale = nn.Parameter(torch.full((4,), 0.25))

    def soft(self, weight: Tensor) -> Tensor:
        return self.hard(weight) * self.scale.sum()

    def pruned(self, *weights: Tensor) -> Tensor:
        return super().pruned(weights[0] * self.scale.sum())

    def penalty(self, *weights: Tensor) -> Tensor:
        return (self.scale.sum() - 0.5).square() + weights[0].square().mean() * self.scale[0]

    @classmethod
    def update(
        cls, masks: Sequence[MaskPolicy], weights: Sequence[tuple[Tensor, ...]], now: Progress
    ) -> None:
        for (weight,) in weights:
            weight.mul_(0.9)
        for mask in masks:
            mask.get_parameter("scale").mul_(0.9)


def check(wrapper: str, spec: PruneSpec) -> None:
    """Train six steps, and compare ranks with each other and with training alone."""
    torch.manual_seed(0)
    alone = pdp_fx.prepare(Net(), spec, batch()[0])
    together = wrapped(copy.deepcopy(alone), wrapper)
    alone_sgd = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    together_sgd = torch.optim.SGD(together.parameters(), 0.1, momentum=0.9)
    for seed in range(6):
        images, labels = batch(seed)
        expected = one_step(alone, alone_sgd, images, labels)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        loss = one_step(together, together_sgd, images[rank::ranks], labels[rank::ranks])
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / ranks, expected, rtol=1e-4, atol=1e-5)
        found = masks(together)
        require(any(bool((values < 0.5).any()) for values in found) == (seed > 0), "nothing is masked")
        require_equal_on_all_ranks(found)
        for mine, theirs in zip(found, masks(alone), strict=True):
            require(int((mine < 0.5).sum()) == int((theirs < 0.5).sum()), "counts differ from training alone")
    require("sparsity" in str(pdp_fx.report(together)), "no report")
    if wrapper == "fsdp":
        check_gathered(together, alone)
    else:
        pdp_fx.convert(together)


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    """The model as DistributedDataParallel or FSDP2 trains it."""
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    """One step of training and of the schedule; the loss."""
    # A sharded model has its shards now, and not what it gathers for its forward.
    loss = pdp_fx.penalty(model) + functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        # It leaves the parameters of a sharded model gathered.
        model.eval()(images)
    model.train()
    pdp_fx.step(model)
    return loss.detach()


def masks(model: nn.Module) -> list[Tensor]:
    """The values of all soft masks, computed as the schedule's own ranking does it."""
    gm, pruner = prepared_inside(model)
    with gathered(*pruner.masks.values()):
        weights = [[w.detach() for w in parameters_of(gm, mask)] for _, mask in pruner.mask_items()]
        return [
            mask.values(*read).detach() for (_, mask), read in zip(pruner.mask_items(), weights, strict=True)
        ]


def prepared_inside(model: nn.Module) -> tuple[nn.Module, Pruner]:
    """The prepared model in a wrapper and its state."""
    found = find(model)
    if found is None:
        raise AssertionError("no prepared model")
    return found


def require_equal_on_all_ranks(tensors: list[Tensor]) -> None:
    """Compare bit for bit with rank 0."""
    for tensor in tensors:
        first = tensor.clone()
        dist.broadcast(first, 0)
        require(first.equal(tensor), "ranks have different masks")


def check_gathered(sharded: nn.Module, alone: nn.Module) -> None:
    """The gathered checkpoint of a sharded model loads into one that is not, and that one converts."""
    try:
        pdp_fx.convert(sharded)
    except StateError as err:
        require("gather the state dict" in str(err), str(err))
    else:
        require(False, "a sharded model was converted")
    gathered = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    fresh = copy.deepcopy(alone)
    fresh.load_state_dict(gathered)
    small, images = pdp_fx.convert(fresh), batch(9)[0]
    torch.testing.assert_close(small(images), fresh.eval()(images), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sharded.eval()(images), fresh(images), rtol=1e-5, atol=1e-5)


def check_blocks_are_refused() -> None:
    """A block that is sharded on its own is never gathered, since the graph does not call it."""
    model = pdp_fx.prepare(Net(), PruneSpec(RULES["unstructured"], schedule=RAMP), batch()[0])
    fully_shard(model.get_submodule("inner"), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    try:
        model(batch()[0])
    except StateError as err:
        require("fully_shard on the prepared model itself" in str(err), str(err))
    else:
        require(False, "a sharded block was not refused")


def check_flat_parameters_are_refused() -> None:
    """Outside its forward, FullyShardedDataParallel leaves every process a flat part of some parameters."""
    model = pdp_fx.prepare(Net(), PruneSpec(RULES["unstructured"], schedule=RAMP), batch()[0])
    flat = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    for verb in (pdp_fx.step, pdp_fx.penalty, pdp_fx.report):
        try:
            verb(flat)
        except StateError as err:
            require("by fully_shard instead" in str(err), str(err))
        else:
            require(False, "flat parameters were ranked")


def check_shards_are_not_prepared() -> None:
    """A model that is sharded before it is prepared would be ranked in parts."""
    sharded = wrapped(Net(), "fsdp")
    try:
        pdp_fx.prepare(sharded, PruneSpec(RULES["unstructured"], schedule=RAMP), batch()[0])
    except StateError as err:
        require("prepare the model first" in str(err), str(err))
    else:
        require(False, "a sharded model was prepared")


def require(holds: bool, message: str) -> None:
    """Raise unless ``holds``."""
    if not holds:
        raise AssertionError(f"rank {dist.get_rank()}: {message}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    decaying = PruneSpec(RULES["unstructured"], schedule=RAMP, forward="hard", pruned_decay=0.5)
    own = PruneSpec(Unstructured(0.8, policy=Decaying), schedule=RAMP)
    for spec in (*(PruneSpec(rule, schedule=RAMP) for rule in RULES.values()), decaying, own):
        check("ddp", spec)
        check("fsdp", spec)
    check_blocks_are_refused()
    check_flat_parameters_are_refused()
    check_shards_are_not_prepared()
    dist.destroy_process_group()
