"""`transplant`: the smaller layers in a copy of the user's own model.

A converted model is a graph, which does what the model did on inputs like the example. What Python decides
anew at each call, such as how long a list is or when a text ends, is in the code of the user's class only. So
the layers and parameters of the converted graph are put into a copy of the model, and the copy has to give
what the graph gives. Numbers of channels and heads that its modules keep are counted anew for that; where its
code says how many there are, it does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from itertools import combinations, islice, product

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

from pdp_fx.api import converted
from pdp_fx.collecting import collecting_new
from pdp_fx.errors import StateError, VerifyError
from pdp_fx.example_inputs import matching
from pdp_fx.field_checks import described
from pdp_fx.measuring import Precision
from pdp_fx.ops.kinds import named_modules
from pdp_fx.passes import CONVERT_UNFOLDED
from pdp_fx.proving import LOOSE, LOOSE_ROUNDINGS, TOLERANCE
from pdp_fx.pruner import CHILD, find, find_one
from pdp_fx.tracing.copying import copied
from pdp_fx.tracing.examples import ExampleCall, Inputs
from pdp_fx.tracing.leaves import is_layer
from pdp_fx.tracing.module import in_double
from pdp_fx.tracing.outcome import Outcome
from pdp_fx.tracing.preserve import unwritten
from pdp_fx.tracing.relinking import relink
from pdp_fx.tracing.shells import is_shell
from pdp_fx.tracing.source import source_of
from pdp_fx.tracing.verify import tried


@collecting_new()
@torch.inference_mode(False)
def transplant(prepared: nn.Module, model: nn.Module) -> nn.Module:
    """Convert ``prepared``, and put the smaller layers into a copy of your own model.

    The result has the methods of your class, such as ``generate``, and does what a graph cannot, such as
    taking lists of any length. Its BatchNorm is not folded, so that it can be trained further.

    Args:
        prepared: a prepared model, as for `convert`; it is not changed.
        model: what was given to `prepare`, or another of the same architecture; it is not changed.

    Returns:
        a copy of ``model`` in eval mode. Whole numbers that its modules keep as attributes, such as
        ``num_heads``, are counted anew where it takes that to be equal. Its outputs equal those of the
        converted model up to rounding on the example inputs, and on others that both take: another batch,
        other sizes, and other numbers. What its other methods do is not compared, nor what it does in
        training mode: what training alone uses is as it was trained, and as wide as it was.

    Raises:
        StateError: as for `convert`; or ``prepared`` was made without example inputs, or of another model.
        SpecError: as for `convert`.
        VerifyError: the code of ``model`` does not go with the smaller layers, as where it counts channels or
            heads in another way, or computes a weight that `convert` writes down; the message says where it
            fails.
            Or as for `convert`.
        PassError: as for `convert`.

    Example:
        >>> from pdp_fx import Channels, PruneSpec, Schedule, prepare, step
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> prepared = prepare(model, PruneSpec(Channels(0.5), schedule=Schedule(0, 1.0)), torch.ones(1, 4))
        >>> step(prepared)
        >>> transplant(prepared, model)[0]
        Linear(in_features=4, out_features=4, bias=True)
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StateError(f"transplant needs the model that was given to prepare, got {described(model)}")
    gm, pruner = find_one(prepared, "transplant")
    if pruner.example_inputs is None:
        raise StateError(
            "the model was prepared without example inputs, on which the result has to be compared; write "
            "prepare(model, spec, example_inputs)"
        )
    _refuse_another(gm, model)
    small = converted(prepared, None, CONVERT_UNFOLDED)
    made = copied(model).eval()
    counts = _counts(made, _fill(made, small, gm))
    refusals: list[VerifyError] = []
    # The two share tensors, to which a call may write.
    with unwritten(made):
        for chosen in islice(_choices(counts), MOST_CHOICES):
            with _counted(chosen) as counted:
                try:
                    _check(made, small, model, pruner.example_inputs)
                except VerifyError as err:
                    refusals.append(err)
                else:
                    counted.pop_all()
                    return made
    raise refusals[0]


def _refuse_another(gm: fx.GraphModule, model: nn.Module) -> None:
    """Refuse a model that has not the parameters of the prepared one, by their names and shapes."""
    if find(model) is not None:
        raise StateError("the second model is prepared, too; give the one that was given to prepare")
    own = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, parameter in gm.named_parameters():
        if not name.startswith(f"{CHILD}.") and own.get(name) != parameter.shape:
            raise StateError(
                f"the model has no parameter {name} of shape {tuple(parameter.shape)}, as the prepared one "
                "has; give the model that was given to prepare, or one of its architecture"
            )


Lengths = dict[str, set[tuple[int, int]]]
"""By the path of a module, how long the axes of its parameters and buffers were, and are."""


def _fill(made: nn.Module, small: fx.GraphModule, gm: fx.GraphModule) -> Lengths:
    """Put the layers, parameters and buffers of a converted graph where a model has its own.

    What the converted graph does not read, as what training alone uses, is as in the prepared graph.
    """
    own = dict(named_modules(made))
    tensors = (*made.named_parameters(remove_duplicate=False), *made.named_buffers(remove_duplicate=False))
    before = {name: tensor.shape for name, tensor in tensors}
    names: dict[int, list[str]] = {}
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    tied = {name: names[id(tensor)] for name, tensor in tensors}
    trained = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    with torch.no_grad():
        for name, tensor in dict(tensors).items():
            if name in trained and trained[name].shape == tensor.shape:
                tensor.copy_(trained[name])
    for path, layer in named_modules(small):
        if is_layer(layer) and not is_shell(layer) and isinstance(own.get(path), type(layer)):
            if is_parametrized(own[path]) is is_parametrized(layer):
                _become(own[path], layer)
            else:
                made.set_submodule(path, layer)
                relink(made.modules(), {own[path]: layer})
    owners = dict(named_modules(made))
    read = dict(
        (*small.named_parameters(remove_duplicate=False), *small.named_buffers(remove_duplicate=False))
    )
    lengths: Lengths = {}
    for name, tensor in read.items():
        path, _, leaf = name.rpartition(".")
        owner = owners.get(path)
        if owner is None or leaf not in {**owner._parameters, **owner._buffers}:
            continue
        # What nobody reads in `forward` may be one with what somebody does.
        for each in [name, *(other for other in tied.get(name, ()) if other not in read)]:
            path, _, leaf = each.rpartition(".")
            lengths.setdefault(path, set()).update(zip(before.get(name, ()), tensor.shape, strict=False))
            setattr(owners[path], leaf, tensor)
    converted_too = {path for path, _ in named_modules(small)}
    for path in lengths.keys() - converted_too:
        # A layer that `forward` does not call; those that it calls are as they were converted.
        if is_layer(owners[path]):
            now, held = _unique(lengths[path]), vars(owners[path])
            held |= {name: now[value] for name, value in held.items() if type(value) is int and value in now}
    return lengths


def _unique(pairs: set[tuple[int, int]]) -> dict[int, int]:
    """The lengths that have changed, each with what it is now; one that has become two says nothing."""
    times = Counter(before for before, _ in pairs)
    return {before: after for before, after in pairs if times[before] == 1 and before != after}


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _become(own: nn.Module, layer: nn.Module) -> None:
    """Give a layer of the model all that a converted one has, but its own class, and its own hooks.

    It may have further names, and its hooks may be methods of the model around it.
    """
    for table in _HOOKS:
        for key in vars(own)[table].keys() - vars(layer)[table].keys():
            del vars(own)[table][key]
    vars(own).update({name: value for name, value in vars(layer).items() if "_hooks" not in name})


Count = tuple[type, str]
"""An attribute of the modules of a class that may be a number of channels or heads."""

Numbers = list[tuple[nn.Module, int]]
"""What such an attribute would be in each of these modules."""


def _counts(made: nn.Module, lengths: Lengths) -> dict[Count, list[Numbers]]:
    """The numbers that may count the channels or heads of a module, and the ways to count them now.

    Of one with parameters of its own, such as the ``nf`` of a `Conv1D` of transformers, it may be any that is
    the length of one of their axes; a length that has become two says nothing. Of one with layers that have
    kept a share of their channels, such as the projections of an attention, any that divides how many a layer
    had; which layer's share it keeps is the same in all modules of a class. The model does not say; trying
    does.
    """
    found: dict[Count, dict[tuple[str, int], Numbers]] = {}
    for path, module in named_modules(made):
        own = _unique(lengths.get(path, set()))
        inside = [(name, f"{path}.{name}" if path else name) for name, _ in module.named_children()]
        for name, value in () if is_layer(module) else vars(module).items():
            if type(value) is not int or value < 2:
                continue
            ways = {("", 0): own[value]} if value in own else {}
            for layer, place in inside:
                ways |= {(layer, rank): now for rank, now in _counted_by(lengths.get(place, set()), value)}
            for way, now in ways.items():
                found.setdefault((type(module), name), {}).setdefault(way, []).append((module, now))
    return {count: _different(ways.values()) for count, ways in found.items()}


def _counted_by(pairs: set[tuple[int, int]], value: int) -> Iterator[tuple[int, int]]:
    """What a number would be if it kept a share that a layer has kept of an axis, by that share's rank."""
    changed = [(before, after) for before, after in pairs if before != after]
    for rank, share in enumerate(sorted({Fraction(after, before) for before, after in changed})):
        divides = any(before % value == 0 for before, after in changed if Fraction(after, before) == share)
        if divides and (value * share).denominator == 1:
            yield rank, int(value * share)


def _different(ways: Iterable[Numbers]) -> list[Numbers]:
    return list({tuple((id(module), now) for module, now in way): way for way in ways}.values())


MOST_CHOICES = 256
"""So many ways to count anew are tried."""


def _choices(counts: dict[Count, list[Numbers]]) -> Iterator[list[tuple[nn.Module, str, int]]]:
    """Which numbers to change, none at first, and the fewest."""
    for size in range(len(counts) + 1):
        for chosen in combinations(counts, size):
            for ways in product(*(counts[count] for count in chosen)):
                pairs = zip(chosen, ways, strict=True)
                yield [(module, name, now) for (_, name), way in pairs for module, now in way]


@contextmanager
def _counted(chosen: list[tuple[nn.Module, str, int]]) -> Generator[ExitStack, None, None]:
    """Have attributes of modules be these numbers inside the block, and after it if the stack is emptied."""
    with ExitStack() as stack:
        for module, name, now in chosen:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, now)
        yield stack


def _check(made: nn.Module, small: fx.GraphModule, model: nn.Module, inputs: Inputs) -> None:
    """Check that a model gives what the converted graph gives, on the example and on what else both take.

    Rounding may hide in the model's dtype that its code does something else, so copies in float64 decide. If
    they do not run, a tolerance as that of `convert` does.

    Raises:
        VerifyError: it does not, or it fails on the example.
    """
    dtype = next((each.dtype for each in small.parameters() if each.is_floating_point()), torch.float32)
    double = dtype == torch.float64
    example = ExampleCall(*matching(inputs, small))
    # A model that fails at once need not be copied.
    fails = isinstance(tried(made, example, training=False), Exception)
    decided = double or (not fails and _agree_in_double(made, small, inputs))
    loose = None if decided else max(LOOSE, LOOSE_ROUNDINGS * torch.finfo(dtype).eps)
    for call in (example, *_variations(example)):
        wanted, got, exact = _given(small, made, call)
        # What is made up may be refused, by the graph or by the model as it was, too.
        if call is not example and isinstance(wanted, Exception):
            continue
        if call is not example and isinstance(got, Exception) and _refuses(model, call):
            continue
        if isinstance(wanted, Exception):
            raise _refusal(made, f"takes an example that its converted graph refuses: {wanted}")
        if isinstance(got, Exception):
            raise _refusal(
                made, f"fails with its smaller layers: {type(got).__name__}: {got} ({source_of(got)})"
            )
        if not wanted.is_near(got, exact if double else loose):
            raise _refusal(made, f"with its smaller layers {wanted.difference(got)}")


def _agree_in_double(made: nn.Module, small: fx.GraphModule, inputs: Inputs) -> bool:
    """Whether copies in float64 run, and then agree.

    Raises:
        VerifyError: they run, and differ.
    """
    try:
        twins = in_double(copied(small)), in_double(copied(made))
    except (RuntimeError, TypeError):
        return False
    example = ExampleCall(*matching(inputs, twins[0]))
    for call in (example, *_variations(example)):
        wanted, got, exact = _given(*twins, call)
        if isinstance(wanted, Exception) or isinstance(got, Exception):
            if call is example:
                return False
        elif not wanted.is_near(got, exact):
            raise _refusal(made, f"with its smaller layers {wanted.difference(got)}, as float64 shows")
    return True


def _given(
    small: nn.Module, made: nn.Module, call: ExampleCall
) -> tuple[Outcome | Exception, Outcome | Exception, float]:
    """What the graph gives and what the model gives, and the tolerance for models in float64."""
    with Precision() as precision:
        wanted = tried(small, call, training=False)
    exact = TOLERANCE[torch.float64 if precision.double else torch.float32]
    return wanted, tried(made, call, training=False), exact


def _refusal(made: nn.Module, problem: str) -> VerifyError:
    return VerifyError(
        f"{type(made).__name__} {problem}. Its code goes by what has changed, as by how many channels or "
        "heads there were, or by a weight that it computes, or it calls a layer for nothing in eval mode: "
        "let that stay, by an override of the spec, or use the graph that convert gives"
    )


def _refuses(model: nn.Module, call: ExampleCall) -> bool:
    return isinstance(tried(model, call, training=False), Exception)


def _variations(example: ExampleCall) -> Iterator[ExampleCall]:
    """Calls with other batches, other numbers and other sizes."""
    yield from example.others()
    yield from islice(example.with_other_numbers(), 2)
    if not example.has_places_elsewhere:
        for size in sorted(example.sizes()):
            yield from example.resized(size)
