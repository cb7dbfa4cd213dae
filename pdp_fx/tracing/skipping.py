"""What a model does or leaves out at random, such as layers (LayerDrop), as choices in a graph.

A branch on random numbers alone depends on no data, so both of its ways can be recorded. The way with more
steps is the one that the graph is flat for. Where the other way leaves steps out, or has others in their
place, and goes on with another value, `kept_unless` chooses between the two; the code of the graph runs the
steps only if they are needed (`pdp_fx.tracing.blocks`).

A branch that replaces numbers which are not finite, as detection transformers have it, is recorded both ways,
too. There `torch.where` chooses: what the branch computes is cheap, and no number is read out of a tensor.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch

from pdp_fx.tracing.align import Alignment, kind_of_step, opcodes
from pdp_fx.tracing.arguments import all_values
from pdp_fx.tracing.objects import DrawNumber
from pdp_fx.tracing.steps import (
    CHECKS,
    DRAWS_OUTSIDE,
    Constant,
    Draw,
    Expr,
    Recording,
    Step,
    Value,
    identity,
    is_data,
    parts_of,
    root,
    with_steps,
)

_log = logging.getLogger(__name__)

Answers = Callable[[int], bool]
"""Which way to go at branches on a random number, by the number of that in the run."""


def kept_unless(skipped: bool, instead: Any, made: Any) -> Any:
    """The second value if the steps that make the third are skipped, else the third."""
    return instead if skipped else made


def with_choices(
    base: Recording, again: Callable[[Answers], Recording], in_eval: Recording | None
) -> Recording | None:
    """The recording of a model that branches on random numbers, with both ways of each branch.

    The other way is recorded for every second number at once, so that the value which goes on in the place
    of skipped steps is seen by a step that is not skipped. Further recordings show of every two numbers,
    and of every three in a row, whether what one chooses depends on the others.

    Args:
        base: a recording that answers False at each branch.
        again: records once more, with other answers.
        in_eval: the recording of eval mode, if ``base`` is that of training.

    Returns:
        The recording; None if a branch does more than to leave steps out or to replace them, or if what one
        does depends on what another does.
    """
    try:
        other = again(lambda _: True)
        count = 1 + max(draw.number for draw in base.draws)
        made = {frozenset[int](): base, frozenset(range(count)): other}

        def taking(taken: frozenset[int]) -> Recording:
            if taken not in made:
                made[taken] = again(lambda draw: draw in taken)
            return made[taken]

        longer = _taken_in_full(base, other, in_eval)
        full = taking(longer)
        turns = [
            frozenset(number for number in range(count) if number >> bit & 1 == side)
            for bit in range(max(1, (count - 1).bit_length()))
            for side in (0, 1)
        ]
        thirds = [
            frozenset(number for number in range(count) if (number + shift) % 3 < width)
            for width in (1, 2)
            for shift in range(3)
        ]
        recorded = {
            turn: taking(longer ^ turn) for turn in (*turns, *thirds, frozenset(range(count))) if turn
        }
        merge = _Merge(full, longer)
        return merge.merged([(turn, recorded[turn]) for turn in turns[:2] if turn], list(recorded.items()))
    except Exception as err:  # noqa: BLE001 the model need not bear to be told what it has drawn
        _log.info("branches on random numbers are not followed: %s", err)
        return None


def _taken_in_full(base: Recording, other: Recording, in_eval: Recording | None) -> frozenset[int]:
    """The numbers at which the full recording answers True; ``base`` does so nowhere, ``other`` everywhere.

    It goes the way that eval mode goes, if eval mode has all that one of the ways has more, else the longer.
    """
    ways: dict[int, tuple[Counter[Hashable], Counter[Hashable]]] = {}
    pieces = (each.between(each.draws)[1:] for each in (base, other))
    for draw, *segments in zip(base.draws, *pieces, strict=False):
        counters = ways.setdefault(draw.number, (Counter(), Counter()))
        for counter, steps in zip(counters, segments, strict=True):
            counter.update(_kinds(steps))
    known = frozenset(map(kind_of_step, in_eval.steps)) if in_eval is not None else frozenset[Hashable]()
    taken = set[int]()
    for number, (refused, accepted) in ways.items():
        more, more_accepted = refused - accepted, accepted - refused
        in_refused, in_accepted = known.issuperset(more), known.issuperset(more_accepted)
        longer = more_accepted.total() > more.total()
        if in_accepted if more and more_accepted and in_refused != in_accepted else longer:
            taken.add(number)
    return frozenset(taken)


def is_drawn(value: Any) -> bool:
    """Whether a value is a tensor computed from random numbers, and from no inputs, parameters or buffers."""
    left, reader = [value], dict[Any, Any]({id(value): None})
    while left:
        part = left.pop()
        data = _data_of(part) if _is_looked_into(part) and part not in _NOT_DRAWN else None
        if data is None or not (part.random or data):
            while part is not None:
                if isinstance(part, Step):
                    _NOT_DRAWN.add(part)
                part = reader[id(part)]
            return False
        for each in data:
            if id(each) not in reader:
                reader[id(each)] = part
                left.append(each)
    return True


_NOT_DRAWN: weakref.WeakSet[Step] = weakref.WeakSet()
"""Steps that depend on more than random numbers; a loop may ask of what is computed from them each time."""


def reads(value: Any, what: str) -> str:
    """What a model does that reads a value which depends on data, as the end of a sentence.

    Args:
        value: what is read; of numbers from outside torch the drawing is what is to be told.
        what: what the model does with any other.
    """
    drawn = is_drawn(value) and any(
        isinstance(part, Step) and isinstance(part.target, DrawNumber)
        for part in _computed_from(value, _data_of)
    )
    return DRAWS_OUTSIDE if drawn else what


def asks_finite(value: Any) -> bool:
    """Whether a value says of tensors, all together, whether their numbers are finite."""
    return all(
        _is_looked_into(part) and (part.called in _ASKS or (part.called in _COMBINES and _data_of(part)))
        for part in _computed_from(value, _combined)
    )


def _combined(step: Step) -> list[Any]:
    return [] if step.called in _ASKS else _data_of(step)


def _is_looked_into(value: Any) -> bool:
    """Whether a value is a step that calls no module and nothing that is kept whole."""
    return isinstance(value, Step) and not value.reason and value.op in ("call_function", "call_method")


def _data_of(step: Step) -> list[Any]:
    """What a step is given that depends on numbers in tensors."""
    return [part for part in all_values((step.args, step.kwargs)) if is_data(part)]


def _computed_from(value: Any, of: Callable[[Step], list[Any]]) -> Iterator[Any]:
    """A value, and what the steps behind it are computed from, each once."""
    left, seen = [value], set[int]()
    while left:
        part = left.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            left += of(part) if isinstance(part, Step) else ()


_ASKS = frozenset({"isfinite", "isinf", "isnan"})
_COMBINES = frozenset({
    "all", "any", "logical_not", "logical_or", "logical_and", "bitwise_or", "bitwise_and", "bitwise_not",
    "or_", "and_", "invert", "__or__", "__and__", "__invert__", "max",
})  # fmt: skip


def chooses_alike(alignment: Alignment) -> bool:
    """Whether the choices of training fit what eval mode does.

    What eval mode chooses, too, must be chosen of the same steps. Of what only training chooses, eval mode
    may make the steps that are not skipped, and use no more of them than their choices; or none of them.
    """
    shared, trained = dict[int, int](), dict[Step, Step | None]()
    for pair in alignment.pairs:
        if pair.in_eval is not None:
            trained[pair.in_eval] = pair.in_train
            if pair.in_train is not None and pair.in_eval.target is kept_unless:
                shared[pair.in_train.skipped] = pair.in_eval.skipped
    in_both = frozenset(shared) | frozenset(-number for number in shared)
    for pair in alignment.pairs:
        in_train, in_eval = (0 if step is None else step.skipped for step in (pair.in_train, pair.in_eval))
        differ = shared.get(abs(in_train)) != abs(in_eval) or in_train * in_eval < 0
        if (in_eval or in_train in in_both) and differ:
            return False
    chosen = [
        step
        for step in alignment.in_train.steps
        if step.target is kept_unless and step.skipped not in in_both
    ]
    made = {choice.args[2] for choice in chosen}
    run_in_eval = {step.skipped for step in trained.values() if step is not None}
    if any(choice.args[2] not in trained.values() and choice.skipped in run_in_eval for choice in chosen):
        return False

    inside: dict[Step, int] = {}
    for step, counterpart in trained.items():
        read = {inside[source] for source in _steps_in((step.args, step.kwargs)) if source in inside}
        if counterpart is None:
            # What eval mode does besides, such as to scale what is never left out there, is inside, too.
            inside |= dict.fromkeys([step] if read else (), max(read, default=0))
        elif counterpart.skipped not in (0, *in_both) and counterpart not in made:
            inside[step] = counterpart.skipped
        if len(read) > 1 or (counterpart is not None and not read <= {counterpart.skipped}):
            return False
    return inside.keys().isdisjoint(_steps_in(alignment.in_eval.output))


def act_outside(steps: Iterable[Step]) -> bool:
    """Whether steps do, or may do, more than to make values: they draw, or change what others have made."""
    own = set(steps)
    changed = (root(value) for step in own for value in step.changes)
    return any(step.random or step.updates or step.reason for step in own) or any(
        maker not in own for maker in changed
    )


class _DiffersError(Exception):
    """Raised where two recordings differ by more than steps that are left out."""


_Other = tuple[frozenset[int], Recording]
"""A recording, and the branches at which it takes the other way."""


@dataclass
class _Region:
    """Steps that a branch may leave out, and what happens then.

    Attributes:
        draw: the branch.
        steps: what is left out, with the checks of it.
        instead: what runs in the place of that.
        choices: the choices of what goes on, by the steps that make it.
    """

    draw: Draw
    steps: list[Step] = field(default_factory=list[Step])
    instead: list[Step] = field(default_factory=list[Step])
    choices: dict[Step, Step] = field(default_factory=dict[Step, Step])

    @property
    def has_effects(self) -> bool:
        """Whether the steps do more than to make values."""
        return act_outside(self.steps) or act_outside(self.instead)


class _Merge:
    """The full recording, compared with others that leave steps out.

    Args:
        full: the recording with all steps; its steps are changed.
        taken: the random numbers at which it answers True.
    """

    def __init__(self, full: Recording, taken: Container[int]) -> None:
        self.full = full
        self.taken = taken
        self.regions: list[_Region] = []
        self._region_of: dict[Step, _Region] = {}
        self._other_way: dict[int, list[Step]] = {}

    def merged(self, others: Sequence[_Other], further: Sequence[_Other]) -> Recording:
        """The full recording with choices, from recordings that take the other way at the given numbers.

        Args:
            others: recordings that show what each branch leaves out.
            further: recordings that must agree with that.
        """
        if any(step.recomputed for step in self.full.steps):
            raise _DiffersError("more differs than what is left out")
        paired = [(other, self._paired(turn, other)) for turn, other in others]
        for other, pairs in paired:
            for made, instead in self._compared(frozenset(), other, pairs):
                self._choose(made, _translated(instead, pairs))
        self._drop_useless()
        for number, region in enumerate(self.regions, 1):
            self._mark(region, number)
        for turn, other in further:
            self._check(turn, other)
        return self._rewritten()

    def _drop_useless(self) -> None:
        """Run the steps of regions that nothing is chosen of always; nobody needs them."""
        for region in self.regions:
            if not region.choices and region.has_effects:
                raise _DiffersError("what is left out has effects of its own")
        self.regions = [region for region in self.regions if region.choices]
        used = {id(region) for region in self.regions}
        self._region_of = {step: each for step, each in self._region_of.items() if id(each) in used}

    def _mark(self, region: _Region, number: int) -> None:
        """Add the checks of what a region makes to it, and note in its steps and choices its number."""
        own, repairs = set(region.steps), region.draw.repairs
        start, stop = (self.full.steps.index(region.steps[place]) for place in (0, -1))
        region.steps = [
            step
            for step in self.full.steps[start : stop + 1]
            if step in own or (step.target in CHECKS and not own.isdisjoint(_steps_in(step.args)))
        ]
        if repairs and (region.instead or region.has_effects):
            raise _DiffersError("what is left out has effects of its own")
        for steps, sign in ((region.steps, 1), (region.instead, -1), (region.choices.values(), 1)):
            for step in steps:
                step.skipped, step.repairs = 0 if repairs else sign * number, repairs
        region.choices = {made: region.choices[made] for made in region.steps if made in region.choices}
        for choice in region.choices.values():
            # Without it the code of the graph would not skip what is done besides.
            choice.observed = region.has_effects
        self._region_of |= dict.fromkeys(region.steps, region)
        if repairs:
            for step in _computed_from(region.draw.value, _combined):
                step.repairs = True

    def _check(self, turn: frozenset[int], other: Recording) -> None:
        """Check that a recording which takes the other way at some numbers does what the choices say."""
        pairs = self._paired(turn, other)
        if any(True for _ in self._compared(turn, other, pairs)):
            raise _DiffersError("what one branch leaves out depends on another")
        made = {
            identity(self._chosen(step.args[0], turn))
            for step in self.full.steps
            if step.target in CHECKS and not self._is_left_out(step, turn)
        }
        checks = (step.args[0] for step in other.steps if step.target in CHECKS)
        if not made.issuperset(identity(_translated(check, pairs)) for check in checks):
            raise _DiffersError("a check is left out that others rely on")

    def _is_left_out(self, step: Step, turn: frozenset[int]) -> bool:
        region = self._region_of.get(step)
        return region is not None and region.draw.number in turn

    def _compared(
        self, turn: frozenset[int], other: Recording, pairs: Mapping[Step, Step]
    ) -> Iterator[tuple[Any, Any]]:
        """The differences from a recording, if the branches on these numbers leave their steps out."""
        found = [(step.args, step.kwargs, step.changes) for step in pairs]
        mine = [(step.args, step.kwargs, step.changes) for step in pairs.values()]
        return differences(self._chosen((mine, self.full.output), turn), (found, other.output), pairs)

    def _chosen(self, tree: Any, turn: frozenset[int]) -> Any:
        """Arguments as they are if the branches on these numbers leave their steps out."""

        def chosen(step: Step) -> Any:
            region = self._region_of.get(step) if self._is_left_out(step, turn) else None
            choice = None if region is None else region.choices.get(step)
            return step if choice is None else self._chosen(choice.args[1], turn)

        return with_steps(chosen, tree)

    def _paired(self, turn: frozenset[int], other: Recording) -> dict[Step, Step]:
        """The steps of another recording with their counterparts; those without are put into regions."""
        mine, theirs = (each.between(each.draws) for each in (self.full, other))
        if len(mine) != len(theirs):
            raise _DiffersError("more differs than what is left out")
        pairs: dict[Step, Step] = {}
        for branch, (steps, found) in enumerate(zip(mine, theirs, strict=True), -1):
            if branch >= 0 and self.full.draws[branch].number in turn:
                if branch not in self._other_way:
                    self._other_way[branch] = self._find_regions(self.full.draws[branch], steps, found, pairs)
                steps = self._other_way[branch]
            if _kinds(steps) != _kinds(found):
                raise _DiffersError("what one branch leaves out depends on another")
            pairs |= dict(zip(found, steps, strict=True))
        return pairs

    def _find_regions(
        self, draw: Draw, full: list[Step], others: list[Step], known: Mapping[Step, Step]
    ) -> list[Step]:
        """Find what the steps behind a branch are if it goes the other way; returns what runs then.

        Args:
            draw: the branch.
            full: the steps behind it in the full recording.
            others: those in one that goes the other way.
            known: the counterparts of earlier steps of that one.
        """
        pairs, way = dict(known), list[Step]()
        region: _Region | None = None
        for step, found in _matched(full, others):
            if step is not None and found is not None and self._computes_alike(step, found, pairs):
                region = None
                pairs[found] = step
                way.append(step)
                continue
            if region is None:
                region = _Region(draw)
                self.regions.append(region)
            if step is not None:
                region.steps.append(step)
                self._region_of[step] = region
            if found is not None:
                args, kwargs, changes = _translated((found.args, found.kwargs, found.changes), pairs)
                copy = pairs[found] = replace(found, args=args, kwargs=kwargs, changes=changes)
                region.instead.append(copy)
                self._region_of[copy] = region
                way.append(copy)
        return way

    def _computes_alike(self, step: Step, found: Step, pairs: Mapping[Step, Step]) -> bool:
        """Whether two steps are given the same, or what is made in regions and something in its place."""
        mine, theirs = (step.args, step.kwargs, step.changes), (found.args, found.kwargs, found.changes)
        differing = (made for made, _ in differences(mine, theirs, pairs))
        return all(isinstance(made, Step) and made in self._region_of for made in differing)

    def _choose(self, made: Any, instead: Any) -> None:
        """Note that another value goes on where the step that makes one is left out."""
        region = self._region_of.get(made) if isinstance(made, Step) else None
        if region is None or made not in region.steps:
            raise _DiffersError("more differs than what is left out")
        choices, draw = region.choices, region.draw
        if made not in choices:
            told, by = (None, instead, made), torch.where if draw.repairs else kept_unless
            choices[made] = Step("call_function", by, told, {}, draw.scope, draw.source)
        elif identity(choices[made].args[1]) != identity(instead):
            raise _DiffersError("more differs than what is left out")

    def _rewritten(self) -> Recording:
        """The full recording in which all that follows a region uses its choices."""
        steps: list[Step] = []
        ends = {region.steps[-1]: region for region in self.regions}
        starts = {region.steps[0]: region for region in self.regions}
        flags: dict[int, Value] = {}
        for step in self.full.steps:
            region = starts.get(step)
            if region is not None and region.draw.number not in flags:
                flags[region.draw.number] = self._flag(region.draw, steps)
            self._use_choices(step, self._region_of.get(step))
            steps.append(step)
            region = ends.get(step)
            if region is None:
                continue
            for choice in region.choices.values():
                choice.args = (flags[region.draw.number], *choice.args[1:])
            for other in (*region.instead, *region.choices.values()):
                self._use_choices(other, region)
                steps.append(other)
        output = self._replaced(self.full.output, None)
        if any(step in self._region_of for step in _steps_in(output)):
            raise _DiffersError("more differs than what is left out")
        # What a run gives whose branches were chosen is not what the model gives.
        return replace(self.full, steps=tuple(steps), output=output, outcome=None)

    def _flag(self, draw: Draw, steps: list[Step]) -> Value:
        """What is true if a branch leaves steps out; added to ``steps`` if it is a step."""
        if draw.number not in self.taken:
            return draw.value
        flag = Step("call_function", torch.logical_not, (draw.value,), {}, draw.scope, draw.source)
        flag.repairs = draw.repairs
        steps.append(flag)
        return flag

    def _use_choices(self, step: Step, own: _Region | None) -> None:
        """Let a step use the choices of all regions but its own."""
        step.args = self._replaced(step.args, own)
        step.kwargs = self._replaced(step.kwargs, own)
        step.changes = self._replaced(step.changes, own)
        read = _steps_in((step.args, step.kwargs))
        if any(self._region_of.get(source, own) is not own for source in read):
            raise _DiffersError("more differs than what is left out")

    def _replaced(self, tree: Any, own: _Region | None) -> Any:
        """Arguments in which choices stand for what they choose."""

        def choice(step: Step) -> Step:
            region = self._region_of.get(step)
            return step if region is None or region is own else region.choices.get(step, step)

        return with_steps(choice, tree)


def _kinds(steps: Sequence[Step]) -> list[Hashable]:
    return [kind_of_step(step) for step in steps]


def _matched(full: list[Step], others: list[Step]) -> Iterator[tuple[Step | None, Step | None]]:
    """The steps of both in order, side by side where they are of the same kind."""
    kinds, kinds_of_others = _kinds(full), _kinds(others)
    first = len(full) - len(others)
    if first >= 0 and kinds[first:] == kinds_of_others:
        # A branch leaves out what comes first, of which the rest may have the like.
        yield from zip_longest(full[:first], ())
        yield from zip(full[first:], others, strict=True)
        return
    for tag, i, i_end, j, j_end in opcodes(kinds, kinds_of_others):
        if tag == "equal":
            yield from zip(full[i:i_end], others[j:j_end], strict=True)
        else:
            yield from zip_longest(full[i:i_end], ())
            yield from ((None, other) for other in others[j:j_end])


def differences(mine: Any, theirs: Any, pairs: Mapping[Step, Step]) -> Iterator[tuple[Any, Any]]:
    """The innermost parts in which arguments differ from those of another recording."""
    left, seen = [(mine, theirs)], set[tuple[int, int]]()
    while left:
        mine, theirs = left.pop()
        if isinstance(mine, Expr) and isinstance(theirs, Expr) and mine.call == theirs.call:
            if (id(mine), id(theirs)) in seen:
                continue
            seen.add((id(mine), id(theirs)))
            mine, theirs = (mine.args, mine.kwargs), (theirs.args, theirs.kwargs)
        if isinstance(mine, slice) and isinstance(theirs, slice):
            mine, theirs = (mine.start, mine.stop, mine.step), (theirs.start, theirs.stop, theirs.step)
        if isinstance(mine, dict) and isinstance(theirs, dict) and list(mine) == list(theirs):
            mine, theirs = list(mine.values()), list(theirs.values())
        if isinstance(mine, tuple | list) and isinstance(theirs, tuple | list) and len(mine) == len(theirs):
            left += reversed([*zip(mine, theirs, strict=True)])
        elif not _agree(mine, theirs, pairs):
            yield mine, theirs


def _agree(mine: Any, theirs: Any, pairs: Mapping[Step, Step]) -> bool:
    """Whether a value of another recording is the counterpart of one of the full recording."""
    if isinstance(theirs, Step):
        return pairs.get(theirs) is mine
    if isinstance(mine, Constant) and isinstance(theirs, Constant):
        one, other = mine.tensor, theirs.tensor
        if (one.dtype, one.device, one.shape) != (other.dtype, other.device, other.shape):
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    return mine is theirs or bool(mine == theirs) or bool(mine != mine and theirs != theirs)


def _translated(value: Any, pairs: Mapping[Step, Step]) -> Any:
    """A value of another recording, made of the steps of the full one."""

    def counterpart(step: Step) -> Step:
        if step not in pairs:
            raise _DiffersError("more differs than what is left out")
        return pairs[step]

    return with_steps(counterpart, value)


def _steps_in(tree: Any) -> set[Step]:
    """The steps whose results a structure contains, or computes with."""
    return {part for part in parts_of(tree) if isinstance(part, Step)}
