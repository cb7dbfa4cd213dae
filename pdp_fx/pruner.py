"""The state of a prepared model: the schedule's counter, the masks, and how targets are fixed.

A `Pruner` is a child module named ``pdp``. Everything that changes while the model trains is a
buffer of it or of its masks, registered in graph order, so that resuming is ``load_state_dict``.
"""

from __future__ import annotations

import re
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from pdp_fx.allocation import MacModel
from pdp_fx.channel_policy import ChannelPolicy
from pdp_fx.channels.channel_map import ChannelGroup, ChannelMap
from pdp_fx.checkpoints import other_targets, seal
from pdp_fx.errors import SpecError, StateError
from pdp_fx.field_checks import described
from pdp_fx.granularity import rule_text
from pdp_fx.masks import MaskLayout
from pdp_fx.naming import free_name
from pdp_fx.ops.kinds import kind_of, named_modules
from pdp_fx.planning import CHILD, Planner, parameter_of, parameters_of
from pdp_fx.policy import UNSET, MaskPolicy, Progress, WeightPolicy
from pdp_fx.schedule import share
from pdp_fx.spec import Channels, PruneSpec, Rule
from pdp_fx.tracing.leaves import has_own_forward
from pdp_fx.tracing.preserve import preserved


class Pruner(nn.Module):
    """What `prepare` adds to a model, besides the mask nodes.

    Attributes:
        spec: the user's spec.
        counter: how often `step` was called, a 0-dim int64 buffer.
        seal: a large odd number that stands for the rules of the channels, a 0-dim int64 buffer; averaging it
            or casting it changes it.
        masks: one mask per masked parameter or channel group, in graph order.
        layouts: how group masks are laid out along parameters that carry several groups.
        rules: the rule of each mask.
        layers: the types of the layers that take their masked parameters as arguments, by name.
        weights: all conv and linear weights of the model, in graph order.
        groups: the channel groups that are pruned, with their rules, in the order of their masks.
        kept: the channel groups that stay, with the reasons.
        skipped: what the spec asks for but does not fit, as (name, reason) pairs.
        computed: parameters for which a computed weight is pruned, with the graph node that gives it;
            `convert` writes its value into the parameter.
        channels: the model's channel structure, when it was prepared with example inputs.
        fingerprint: of the prepared graph module, to tell whether it still has these channels.
        tables: digests of its buffers of indices.
        mac_model: multiply-accumulates by kept channels; groups in the order of the channel masks.
        example_inputs: what the model was traced with; `convert` checks itself on it.
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
        self.layers: dict[str, type[nn.Module]] = {}
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
        self.register_load_state_dict_pre_hook(_refuse_other_targets)
        self.register_load_state_dict_post_hook(_accept_dense_checkpoint)
        self.register_load_state_dict_post_hook(_advance_masks)

    def add(self, name: str, mask: MaskPolicy, rule: Rule) -> str:
        """Register a mask under a name made from ``name``, and return that name."""
        if any(mask is other for other in self.masks.values()):
            raise SpecError(
                f"the policy of {rule_text(rule)} gives one mask for several weights; make one for each"
            )
        # A table of modules has attributes of its own, such as "values".
        key = free_name(self.masks, re.sub(r"\W+", "_", name.removesuffix(")")))
        self.masks[key] = mask
        self.rules[key] = rule
        return key

    def mask_items(self) -> list[tuple[str, MaskPolicy]]:
        """All masks by name, in graph order."""
        return [(name, cast(MaskPolicy, mask)) for name, mask in self.masks.items()]

    @property
    def share(self) -> float:
        """The share of the targets that holds now, in [0, 1]."""
        return share(self.spec.schedule, int(self.counter))

    @property
    def allocated(self) -> bool:
        """Whether the targets of all masks are fixed; read at once, since a GPU is waited for."""
        targets = [mask.target for _, mask in self.mask_items() if mask.planned]
        return not targets or bool((torch.stack(targets) != UNSET).all())

    def step(self, gm: fx.GraphModule) -> None:
        """Advance the schedule by one epoch or step; fix the targets when the ramp starts."""
        counter = int(self.counter) + 1
        if counter == 1:
            self.check_layers(gm)
        if counter >= self.spec.schedule.start and not self.allocated:
            self.fix_targets(gm)
        self.counter.fill_(counter)
        self.advance_masks()
        self.update_masks(gm)

    def advance_masks(self) -> None:
        """Set the counts of all masks to what the targets and the counter say."""
        share_now = self.share
        for _, mask in self.mask_items():
            mask.advance(share_now)

    def update_masks(self, gm: fx.GraphModule) -> None:
        """Let the policies do what they do once the counts are set; PDP's does nothing."""
        pools: dict[tuple[object, ...], list[MaskPolicy]] = {}
        for name, mask in self.mask_items():
            alone = name if self.spec.allocation == "uniform" else None
            pools.setdefault((type(mask), self.rules[name], alone), []).append(mask)
        now = Progress(int(self.counter), self.share, self.spec.schedule)
        with torch.no_grad():
            for masks in pools.values():
                update = type(masks[0]).update
                if update.__func__ is not MaskPolicy.update.__func__:
                    update(masks, [tuple(parameters_of(gm, mask)) for mask in masks], now)

    def set_seal(self) -> None:
        """Put the seal on the rules, once all masks are there."""
        self.seal.fill_(seal(self.rules, self.spec.allocation))

    def is_seal(self, number: Tensor) -> bool:
        """Whether a number is the seal on these rules, and a whole one."""
        return number.dtype == torch.int64 and int(number) == seal(self.rules, self.spec.allocation)

    def check_unaveraged(self) -> None:
        """Raise StateError if the seal is broken, or the counts are not those that the counter stands for."""
        if not self.is_seal(self.seal):
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

    def note_layers(self, gm: fx.GraphModule) -> None:
        """Remember which layers take their masked parameters as arguments."""
        modules = [(name, module, kind_of(module)) for name, module in named_modules(gm)]
        self.layers = {
            name: type(module) for name, module, kind in modules if kind and type(module) is kind.explicit
        }

    def check_layers(self, gm: fx.GraphModule) -> None:
        """Raise StateError if a masked layer is no longer what `prepare` has put there."""
        now = dict(named_modules(gm))
        for name, kind in self.layers.items():
            layer = now.get(name)
            if layer is None or type(layer) is not kind or has_own_forward(layer):
                raise StateError(
                    f"{name} was replaced, wrapped or given another forward after prepare, so it is not "
                    "masked as planned; change layers before prepare"
                )
        for _, mask in self.mask_items():
            for name in set(mask.parameters_read) - self.computed.keys():
                parameter_of(gm, name)

    def check_policies(self, gm: fx.GraphModule) -> None:
        """Raise SpecError if a policy of the user's gives layers something that they cannot use."""
        for _, mask in self.mask_items():
            if not type(mask).__module__.startswith("pdp_fx."):
                _check_given(mask, parameters_of(gm, mask))

    def check_hard(self, gm: fx.GraphModule) -> None:
        """Raise StateError if a policy of the user's keeps weights that it calls pruned."""
        for name, mask in self.mask_items():
            if not isinstance(mask, WeightPolicy) or type(mask).__module__.startswith("pdp_fx."):
                continue
            weights = parameters_of(gm, mask)
            with preserved(mask), torch.no_grad():
                left = mask.eval().hard(*weights)[mask.pruned(*weights)]
            if left.count_nonzero() > 0:
                raise StateError(
                    f"{type(mask).__name__}.hard keeps {int(left.count_nonzero())} weights of {name} that "
                    "its pruned calls gone: it must give 0 for them"
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
        """Decide how many units of each mask go in the end, from the weights as they are now."""
        targets = self._plan(gm)
        for name, mask in self.mask_items():
            if name in targets:
                mask.target.fill_(targets[name])

    def _plan(self, gm: fx.GraphModule) -> dict[str, int]:
        return Planner(gm, self.spec, dict(self.mask_items()), self.rules, self.mac_model).plan()


def _check_given(mask: MaskPolicy, weights: list[Tensor]) -> None:
    """Call a mask once in each mode and look at what it gives."""
    like = weights[0]
    shape = (mask.width,) if isinstance(mask, ChannelPolicy) else tuple(like.shape)
    for training, name in ((True, "soft"), (False, "hard")):
        method = f"{type(mask).__name__}.{name}"
        try:
            with preserved(mask), torch.no_grad():
                given: object = mask.train(training)(*weights)
        except Exception as err:
            raise SpecError(
                f"{method} fails for {mask.parameters_read[0]}: {type(err).__name__}: {err}"
            ) from err
        if not isinstance(given, Tensor):
            raise SpecError(f"{method} must give a tensor, got {described(given)}")
        same = given.dtype == like.dtype or (isinstance(mask, ChannelPolicy) and given.is_floating_point())
        if tuple(given.shape) != shape or not same:
            raise SpecError(
                f"{method} gives {given.dtype} of shape {tuple(given.shape)} for {mask.parameters_read[0]}; "
                f"it must give {like.dtype} of shape {shape}"
            )


def units_pruned(gm: nn.Module, mask: MaskPolicy) -> int:
    """How many units the hard mask prunes now: of an N:M mask in every group, of others in all."""
    if mask.planned:
        return mask.pruned_now
    return int(mask.pruned(*parameters_of(gm, mask)).sum())


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
        StateError: it is no module.
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
    """Add to the errors of a load_state_dict that the checkpoint was trained for another target."""
    pruner, errors = cast(Pruner, module), rest[-1]
    keys = {name: f"{prefix}masks.{name}.units" for name in pruner.masks}
    saved = {name: state[key] for name, key in keys.items() if key in state and not state[key].is_meta}
    if any(saved[name].shape != mask.units.shape for name, mask in pruner.mask_items() if name in saved):
        errors.append("the spec has a tau_end and that of the checkpoint has none, or the other way round")
        return
    targets = {name: units[0] for name, units in saved.items()}
    sealed = state.get(f"{prefix}seal")
    channels = [name for name, mask in pruner.mask_items() if isinstance(mask, ChannelPolicy)]
    begun = any(int(targets[name]) != UNSET for name in channels if name in targets)
    if begun and sealed is not None and not pruner.is_seal(sealed):
        errors.append(
            "the checkpoint's channels follow other rules, or another allocation, than "
            f"{_channel_rules(pruner)}; {_WAY_OUT.format(prefix)}"
        )
    uniform = pruner.spec.allocation == "uniform"
    for reason in other_targets(pruner.mask_items(), pruner.rules, uniform, targets):
        errors.append(f"{reason}; {_WAY_OUT.format(prefix)}")


_WAY_OUT = (
    "prepare with the spec of the checkpoint, or leave out its keys that begin with '{}' to load the weights "
    "alone"
)


def _channel_rules(pruner: Pruner) -> str:
    texts = {rule_text(rule): None for rule in pruner.rules.values() if isinstance(rule, Channels)}
    return ", ".join(texts)


def _accept_dense_checkpoint(module: nn.Module, incompatible: Any) -> None:
    """A checkpoint without any pruning state is a dense one: it loads, and the state stays as it is."""
    missing: list[str] = incompatible.missing_keys
    own = list(module.state_dict())
    for key in [key for key in missing if key.endswith(f"{CHILD}.counter")]:
        prefix = key.removesuffix("counter")
        if all(prefix + name in missing for name in own):
            for name in own:
                missing.remove(prefix + name)


def _advance_masks(module: nn.Module, incompatible: Any) -> None:
    """Bring the counts in line with the targets and the counter, and all that is not saved with the spec."""
    pruner = cast(Pruner, module)
    pruner.set_seal()
    pruner.advance_masks()
    for part in pruner.modules():
        if isinstance(part, MaskLayout | ChannelPolicy):
            part.set_tables()
