"""The pruning state of a prepared model: the schedule's counter, the masks, and the targets.

A `Pruner` is the child module ``pdp`` that `prepare` adds. Everything that changes during training is a
buffer of it or of its masks, registered in graph order, so that resuming is ``load_state_dict``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, fx, nn

from pdp_fx.allocation import MacModel
from pdp_fx.channel_policy import ChannelPolicy
from pdp_fx.channels.channel_map import ChannelGroup, ChannelMap
from pdp_fx.checkpoints import conflicts, seal
from pdp_fx.errors import SpecError, StateError
from pdp_fx.field_checks import described
from pdp_fx.granularity import rule_text
from pdp_fx.masks import MaskLayout
from pdp_fx.naming import free_name
from pdp_fx.noted import Noted
from pdp_fx.planning import CHILD, Planner, parameters_of
from pdp_fx.policy import UNSET, MaskPolicy, Progress
from pdp_fx.policy_checks import is_own
from pdp_fx.schedule import ranks_anew, share
from pdp_fx.sharding import gathered
from pdp_fx.spec import Channels, PruneSpec, Rule
from pdp_fx.updating import update

CHECKED_EVERY = 100
"""Once in so many steps of the optimizer layers are looked at, which takes a millisecond."""


class Pruner(nn.Module):
    """What `prepare` adds to a model, besides the mask nodes.

    Attributes:
        spec: the user's spec.
        counter: how often `step` was called, a 0-dim int64 buffer.
        seal: a number derived from the rules of channels and patterns, and the places of the masks
            (`checkpoints.seal`), a 0-dim int64 buffer. Averaging or casting the state changes it, which is
            how `check_unaveraged` notices.
        masks: one mask per masked parameter or channel group, in graph order.
        layouts: the modules that lay group masks out along parameters that carry several groups.
        rules: the rule of each mask, by the mask's name.
        noted: the layers and parameters as they were at `prepare`.
        weights: all conv and linear weights of the model, in graph order.
        groups: the channel groups that are pruned, with their rules, in the order of their masks.
        kept: the channel groups that stay, with the reasons.
        skipped: what the spec asks for but does not fit, as (name, reason) pairs.
        computed: for every parameter in whose place a computed weight is pruned, the name of the graph node
            that computes it; `convert` writes the computed value into the parameter.
        channels: the model's channel structure; None without example inputs.
        fingerprint: a digest of the prepared graph module, to tell whether ``channels`` still holds.
        tables: digests of the graph module's index buffers, by name.
        mac_model: multiply-accumulates as a function of kept channels, with the groups in the order of the
            channel masks; None without example inputs.
        example_inputs: the inputs that the model was traced with, on which `convert` compares outputs.
        emptied: whether the state was on the meta device and nothing has been loaded since; then the schedule
            is as `prepare` made it, and what else policies hold is what there was in memory.
    """

    counter: Tensor
    seal: Tensor

    def __init__(self, spec: PruneSpec, example_inputs: Any) -> None:
        super().__init__()
        self.spec = spec
        self.example_inputs = example_inputs
        self.masks = nn.ModuleDict()
        self.layouts = nn.ModuleDict()
        self.rules: dict[str, Rule] = {}
        self.noted = Noted()
        self.weights: tuple[str, ...] = ()
        self.groups: tuple[tuple[ChannelGroup, Channels], ...] = ()
        self.kept: tuple[ChannelGroup, ...] = ()
        self.skipped: tuple[tuple[str, str], ...] = ()
        self.computed: dict[str, str] = {}
        self.channels: ChannelMap | None = None
        self.fingerprint = ""
        self.tables: dict[str, str] = {}
        self.mac_model: MacModel | None = None
        self.register_buffer("counter", torch.tensor(0))
        self.register_buffer("seal", torch.tensor(0))
        self.emptied = False
        self.register_load_state_dict_pre_hook(_refuse_other_targets)
        self.register_load_state_dict_post_hook(_accept_dense_checkpoint)
        self.register_load_state_dict_post_hook(_advance_masks)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Start the schedule anew where a state that held no numbers is given memory, as by `to_empty`."""
        empty = self.counter.is_meta
        super()._apply(fn, recurse)
        if empty and not self.counter.is_meta:
            self.emptied = True
            with torch.no_grad():
                self.counter.zero_()
                for _, mask in self.mask_items():
                    mask.forget_target()
                self.set_tables()
        return self

    def add(self, name: str, mask: MaskPolicy, rule: Rule) -> str:
        """Register a mask under a name made from ``name``, and return that name."""
        if any(mask is other for other in self.masks.values()):
            raise SpecError(
                f"the policy of {rule_text(rule)} gives one mask for several weights; make one for each"
            )
        # A ModuleDict refuses keys that are names of its own attributes, such as "values".
        key = free_name(self.masks, re.sub(r"\W+", "_", name.removesuffix(")")))
        self.masks[key] = mask
        self.rules[key] = rule
        return key

    def mask_items(self) -> list[tuple[str, MaskPolicy]]:
        """All masks by name, in graph order."""
        return [(name, cast(MaskPolicy, mask)) for name, mask in self.masks.items()]

    @property
    def has_other_policies(self) -> bool:
        """Whether some masks are not this package's, and so may change the model from the start."""
        return any(not is_own(mask) for _, mask in self.mask_items())

    @property
    def share(self) -> float:
        """The share of the targets that the schedule prunes now, in [0, 1]."""
        return share(self.spec.schedule, int(self.counter))

    @property
    def allocated(self) -> bool:
        """Whether the targets of all masks are fixed; they are read together, to wait for a GPU only once."""
        targets = [mask.target for _, mask in self.mask_items() if mask.planned]
        return not targets or bool((torch.stack(targets) != UNSET).all())

    def step(self, gm: fx.GraphModule) -> None:
        """Advance the schedule by one epoch or step; set the targets when the ramp starts, or on its way."""
        counter, schedule = int(self.counter) + 1, self.spec.schedule
        if schedule.per == "epoch" or counter % CHECKED_EVERY == 1:
            self.noted.check(gm, self.computed)
        else:
            self.noted.check_tied(gm)
        due = self.spec.allocation == "dynamic" and ranks_anew(schedule, counter)
        due = due or (counter >= schedule.start and not self.allocated)
        if due:
            self.fix_targets(gm)
        self.counter.fill_(counter)
        # Before the ramp and after it the counts stay as they are.
        if due or share(schedule, counter) != share(schedule, counter - 1):
            self.advance_masks()
        self.update_masks(gm)

    def advance_masks(self) -> None:
        """Set the counts of all masks by their targets and the counter."""
        share_now = self.share
        for _, mask in self.mask_items():
            mask.advance(share_now)

    def update_masks(self, gm: fx.GraphModule) -> None:
        """Call `MaskPolicy.update` of all policies that define it; PDP's masks do not."""
        pools: dict[tuple[object, ...], list[MaskPolicy]] = {}
        for name, mask in self.mask_items():
            alone = name if self.spec.allocation == "uniform" else None
            pools.setdefault((type(mask), self.rules[name], alone), []).append(mask)
        now = Progress(int(self.counter), self.share, self.spec.schedule)
        for masks in pools.values():
            if type(masks[0]).update.__func__ is not MaskPolicy.update.__func__:
                update(gm, masks, self.computed, now)

    def set_seal(self) -> None:
        """Set the seal, once all masks have been added."""
        self.seal.fill_(self._seal())

    def _seal(self) -> int:
        return seal(self.rules, self.spec, self.computed)

    def set_tables(self) -> None:
        """Set what follows from the rules, the targets and the counter, and what checkpoints leave out."""
        self.set_seal()
        self.advance_masks()
        for part in self.modules():
            if isinstance(part, MaskLayout | ChannelPolicy):
                part.set_tables()

    def check_unaveraged(self) -> None:
        """Raise StateError if the seal or a count does not follow from the rules and the counter."""
        if self.seal.dtype != torch.int64 or int(self.seal) != self._seal():
            raise StateError(
                "the whole numbers of the schedule were averaged, cast to another type or edited; leave them "
                "out of casts, and give an average the state of the model that it follows, "
                "average.module.pdp.load_state_dict(model.pdp.state_dict())"
            )
        for name, mask in self.mask_items():
            if not mask.planned:
                continue
            count = int(mask.count)
            mask.advance(self.share)
            if count != int(mask.count):
                mask.count.fill_(count)
                raise StateError(
                    f"{name} prunes {count} units, which is not what its schedule says: the state "
                    "of the schedule was averaged or edited; give an average the state of the model that it "
                    "follows, average.module.pdp.load_state_dict(model.pdp.state_dict())"
                )

    def check_numbers(self, verb: str) -> None:
        """Raise StateError if the state is on the meta device, where it holds no numbers."""
        if self.counter.is_meta:
            raise StateError(
                f"{verb}(model) needs a model that holds numbers, and this one is on the meta device; call "
                "model.to_empty(device=...) and load a checkpoint first"
            )

    def check_reachable(self, gm: fx.GraphModule) -> None:
        """Raise SpecError if the spec's targets cannot be met, before any time is spent on training."""
        counts = self._plan(gm)
        if not any(counts.values()) and len(counts) == len(self.masks):
            raise SpecError(
                "nothing would be pruned: the ratio rounds to no weight and no channel in any layer, or "
                "min_channels and round_to keep them all; raise the ratio, or lower those two"
            )

    def fix_targets(self, gm: fx.GraphModule) -> None:
        """Set the target of every mask from the present weights."""
        targets = self._plan(gm)
        for name, mask in self.mask_items():
            if name in targets:
                mask.target.fill_(targets[name])

    def _plan(self, gm: fx.GraphModule) -> dict[str, int]:
        with gathered(*self.masks.values()):
            return Planner(gm, self.spec, dict(self.mask_items()), self.rules, self.mac_model).plan()


def units_pruned(gm: nn.Module, mask: MaskPolicy) -> int:
    """How many units the hard mask prunes now; for an N:M mask, in every group."""
    if mask.planned:
        return mask.pruned_now
    with gathered(mask):
        return int(mask.pruned(*parameters_of(gm, mask)).sum())


def refuse_empty(model: nn.Module, verb: str) -> None:
    """Raise StateError if the function ``verb``, which reads weights, is given one on the meta device."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    empty = next((name for name, tensor in tensors if tensor.is_meta), None)
    if empty is not None:
        raise StateError(
            f"{verb}(model) reads the numbers in a model, and {empty} is on the meta device, where there are "
            "none; call model.to_empty(device=...) and load a checkpoint first"
        )


def find(model: nn.Module) -> tuple[fx.GraphModule, Pruner] | None:
    """The first prepared graph module inside ``model`` (which may be a wrapper) and its state, or None."""
    return next(iter(find_all(model)), None)


def find_one(model: nn.Module, verb: str) -> tuple[fx.GraphModule, Pruner]:
    """The one prepared graph module inside ``model`` and its state, for the function ``verb``.

    Raises:
        StateError: there is none, or there are several.
    """
    found = find_all(model)
    if not found:
        raise StateError(f"{verb}(model) needs a model that came from pdp_fx.prepare; this one did not")
    if len(found) > 1:
        raise StateError(f"the model holds {len(found)} prepared models; call {verb} for each of them")
    return found[0]


def find_all(model: nn.Module) -> list[tuple[fx.GraphModule, Pruner]]:
    """All prepared graph modules inside ``model``, itself included, with their states.

    Raises:
        StateError: it is not a module.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StateError(f"the model must be a torch.nn.Module, got {described(model)}")
    found: list[tuple[fx.GraphModule, Pruner]] = []
    for module in model.modules():
        state = getattr(module, CHILD, None)
        if isinstance(module, fx.GraphModule) and isinstance(state, Pruner):
            found.append((module, state))
    return found


def _refuse_other_targets(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, *rest: list[str]
) -> None:
    """A hook of load_state_dict: report as errors what in the checkpoint was trained for other targets.

    Torch loads what it can all the same, so the present schedule is put in the place of that one.
    """
    pruner, errors = cast(Pruner, module), rest[-1]
    found = conflicts(pruner.mask_items(), pruner.rules, pruner.spec, pruner.computed, state, prefix)
    if found:
        own = pruner.state_dict(prefix=prefix, keep_vars=True)
        state.update({key: own[key] for key in state.keys() & own.keys()})
    errors += found


def _accept_dense_checkpoint(module: nn.Module, incompatible: Any) -> None:
    """A hook of load_state_dict: accept a checkpoint without any pruning state, which is a dense model's.

    What policies hold besides the schedule's numbers must be there before.
    """
    pruner, missing = cast(Pruner, module), cast(list[str], incompatible.missing_keys)
    own = list(pruner.state_dict())
    schedule = [name for name in own if name in ("counter", "seal") or name.endswith(".units")]
    for key in [key for key in missing if key.endswith(f"{CHILD}.counter")]:
        prefix = key.removesuffix("counter")
        if all(prefix + name in missing for name in own):
            for name in schedule if pruner.emptied else own:
                missing.remove(prefix + name)


def _advance_masks(module: nn.Module, incompatible: Any) -> None:
    """A hook of load_state_dict: set the counts by targets and counter, and refill what is not saved."""
    pruner = cast(Pruner, module)
    pruner.set_tables()
    pruner.emptied = False
