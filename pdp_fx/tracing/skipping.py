"""Layers that a model skips at random while it trains (LayerDrop), as choices in a graph.

A branch on random numbers alone depends on no data, so both of its ways can be recorded. The way with more
steps is the one that the graph is flat for. Where the other way leaves steps out and goes on with another
value, `kept_unless` chooses between the two; the code of the graph runs the steps only if they are needed
(`pdp_fx.tracing.blocks`).

A branch that replaces numbers which are not finite, as detection transformers have it, is recorded both ways,
too. There `torch.where` chooses: what the branch computes is cheap, and no number is read out of a tensor.
"""

import logging
import random
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pdp_fx.tracing.align import Alignment, kind_of_step
from pdp_fx.tracing.arguments import all_values
from pdp_fx.tracing.objects import DrawNumber
from pdp_fx.tracing.steps import (
    CHECKS,
    DRAWS_OUTSIDE,
    Constant,
    Expr,
    Recording,
    Step,
    Value,
    identity,
    is_data,
)

_log = logging.getLogger(__name__)

TRIED = 2
"""How many sets of half of the branches are recorded to see that branches do not depend on each other."""

Answers = Callable[[int], bool]
"""Which way to go at each branch on random numbers, by its number in the run."""


def kept_unless(skipped: bool, instead: Any, made: Any) -> Any:
    """The second value if the steps that make the third are skipped, else the third."""
    return instead if skipped else made


def with_choices(base: Recording, again: Callable[[Answers], Recording]) -> Recording | None:
    """The recording of a model that branches on random numbers, with both ways of each branch.

    The other way is recorded for every second branch at once, so that the value which goes on in the place
    of skipped steps is seen by a step that is not skipped.

    Args:
        base: a recording that answers False at each branch.
        again: records once more, with other answers.

    Returns:
        The recording; None if a branch does more than to leave steps out, or if what one leaves out depends
        on what another does.
    """
    try:
        other = again(lambda _: True)
        both = enumerate(zip(_segments(base)[1:], _segments(other)[1:], strict=False))
        longer = frozenset(draw for draw, (steps, others) in both if len(others) > len(steps))
        made = {frozenset[int](): base, frozenset(range(len(base.draws))): other}

        def taking(taken: frozenset[int]) -> Recording:
            if taken not in made:
                made[taken] = again(lambda draw: draw in taken)
            return made[taken]

        full = taking(longer)
        draws = range(len(full.draws))
        turns = [frozenset(draws[start::2]) for start in (0, 1)]
        drawn = random.Random(0)
        further = [frozenset(draws), *(frozenset(drawn.sample(draws, len(draws) // 2)) for _ in range(TRIED))]
        recorded = {turn: taking(longer ^ turn) for turn in {*turns, *further} if turn}
        merge = _Merge(full, longer)
        return merge.merged([(turn, recorded[turn]) for turn in turns if turn], list(recorded.items()))
    except Exception as err:  # noqa: BLE001 the model need not bear to be told what it has drawn
        _log.info("branches on random numbers are not followed: %s", err)
        return None


def is_drawn(value: Any) -> bool:
    """Whether a value is a tensor computed from random numbers, and from no inputs, parameters or buffers."""
    if not isinstance(value, Step) or value.reason or value.op not in ("call_function", "call_method"):
        return False
    data = [part for part in all_values((value.args, value.kwargs)) if is_data(part) and not _asks_kind(part)]
    return (value.random or bool(data)) and all(map(is_drawn, data))


def reads(value: Any, what: str) -> str:
    """What a model does that reads a value which depends on data, as the end of a sentence.

    Args:
        value: what is read; of numbers from outside torch the drawing is what is to be told.
        what: what the model does with any other.
    """
    return DRAWS_OUTSIDE if is_drawn(value) and _is_from_outside(value) else what


def _is_from_outside(value: Any) -> bool:
    parts = all_values((value.args, value.kwargs)) if isinstance(value, Step) else ()
    return isinstance(getattr(value, "target", None), DrawNumber) or any(map(_is_from_outside, parts))


def asks_finite(value: Any) -> bool:
    """Whether a value says of tensors, all together, whether their numbers are finite."""
    if not isinstance(value, Step) or value.reason or value.op not in ("call_function", "call_method"):
        return False
    name = value.target if isinstance(value.target, str) else getattr(value.target, "__name__", "")
    data = [part for part in all_values((value.args, value.kwargs)) if is_data(part)]
    return name in _ASKS or (name in _COMBINES and bool(data) and all(map(asks_finite, data)))


def _note_asking(value: Any) -> None:
    """Note of the steps that find whether numbers are finite that they serve a repair."""
    if asks_finite(value):
        value.repairs = True
        for part in all_values((value.args, value.kwargs)):
            _note_asking(part)


_ASKS = frozenset({"isfinite", "isinf", "isnan"})
_COMBINES = frozenset({
    "all", "any", "logical_not", "logical_or", "logical_and", "bitwise_or", "bitwise_and", "bitwise_not",
    "or_", "and_", "invert", "__or__", "__and__", "__invert__", "max",
})  # fmt: skip


def _asks_kind(value: Any) -> bool:
    """Whether a value is the device or the dtype of a tensor."""
    return isinstance(value, Expr) and value.call is getattr and value.args[1] in ("device", "dtype")


def chooses_alike(alignment: Alignment) -> bool:
    """Whether eval mode makes by the same steps what training may skip, and uses no more of them."""
    trained = {pair.in_eval: pair.in_train for pair in alignment.pairs if pair.in_eval is not None}
    choices = [step for step in alignment.in_train.steps if step.target is kept_unless]
    made = {choice.args[2] for choice in choices}
    if not made.issubset(trained.values()):
        return False

    def leaks(tree: Any, number: int) -> bool:
        read = (trained.get(step) for step in _steps_in(tree))
        return any(step is not None and step.skipped not in (0, number) and step not in made for step in read)

    for step, counterpart in trained.items():
        number = 0 if counterpart is None else counterpart.skipped
        if leaks((step.args, step.kwargs), number):
            return False
    return not leaks(alignment.in_eval.output, 0)


class _DiffersError(Exception):
    """Raised where two recordings differ by more than steps that are left out."""


_Other = tuple[frozenset[int], Recording]
"""A recording, and the branches at which it takes the other way."""


@dataclass
class _Region:
    """The steps that one branch may leave out, and the choices of what goes on, by the steps that make it."""

    steps: list[Step]
    choices: dict[Step, Step] = field(default_factory=dict[Step, Step])


class _Merge:
    """The full recording, compared with others that leave steps out.

    Args:
        full: the recording with all steps; its steps are changed.
        taken: the branches at which it answers True.
    """

    def __init__(self, full: Recording, taken: Container[int]) -> None:
        self.full = full
        self.taken = taken
        self.regions: dict[int, _Region] = {}
        self._region_of: dict[Step, int] = {}

    def merged(self, others: Sequence[_Other], further: Sequence[_Other]) -> Recording:
        """The full recording with choices, from recordings that take the other way at the given branches.

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
        if not all(region.choices for region in self.regions.values()):
            raise _DiffersError("what is left out has effects of its own")
        for turn, other in further:
            self._check(turn, other)
        return self._rewritten()

    def _check(self, turn: frozenset[int], other: Recording) -> None:
        """Check that a recording which takes the other way at some branches does what the choices say."""
        pairs = self._paired(turn, other)
        if any(True for _ in self._compared(turn, other, pairs)):
            raise _DiffersError("what one branch leaves out depends on another")
        made = {
            identity(self._chosen(step.args[0], turn))
            for step in self.full.steps
            if step.target in CHECKS and self._region_of.get(step) not in turn
        }
        checks = (step.args[0] for step in other.steps if step.target in CHECKS)
        if not made.issuperset(identity(_translated(check, pairs)) for check in checks):
            raise _DiffersError("a check is left out that others rely on")

    def _compared(
        self, turn: frozenset[int], other: Recording, pairs: Mapping[Step, Step]
    ) -> Iterator[tuple[Any, Any]]:
        """The differences from a recording, if these branches leave their steps out."""
        found = [(step.args, step.kwargs, step.changes) for step in pairs]
        mine = [(step.args, step.kwargs, step.changes) for step in pairs.values()]
        return differences(self._chosen((mine, self.full.output), turn), (found, other.output), pairs)

    def _chosen(self, tree: Any, turn: frozenset[int]) -> Any:
        """Arguments as they are if these branches leave their steps out."""
        if isinstance(tree, Step):
            number = self._region_of.get(tree)
            choice = self.regions[number].choices.get(tree) if number is not None and number in turn else None
            return tree if choice is None else self._chosen(choice.args[1], turn)
        return _mapped(lambda part: self._chosen(part, turn), tree)

    def _paired(self, turn: frozenset[int], other: Recording) -> dict[Step, Step]:
        """The steps of the other recording with their counterparts; those without become regions."""
        mine, theirs = _segments(self.full), _segments(other)
        if len(mine) != len(theirs):
            raise _DiffersError("more differs than what is left out")
        pairs: dict[Step, Step] = {}
        for number, (full, less) in enumerate(zip(mine, theirs, strict=True)):
            skipped = len(full) - len(less) if number - 1 in turn else 0
            kept = full[skipped:] if skipped >= 0 else []
            if [kind_of_step(step) for step in kept] != [kind_of_step(step) for step in less]:
                raise _DiffersError("more differs than what is left out")
            pairs |= dict(zip(less, kept, strict=True))
            if skipped and number - 1 not in self.regions:
                self._add_region(number - 1, full[:skipped])
            elif number - 1 in turn and skipped != self._left_out(number - 1):
                raise _DiffersError("what one branch leaves out depends on another")
        return pairs

    def _left_out(self, number: int) -> int:
        """How many steps a branch leaves out, without checks."""
        steps = self.regions[number].steps if number in self.regions else []
        return sum(step.target not in CHECKS for step in steps)

    def _add_region(self, number: int, steps: list[Step]) -> None:
        """Note which steps a branch may leave out, and the checks of what they make."""
        own = set(steps)
        start, stop = self.full.steps.index(steps[0]), self.full.steps.index(steps[-1])
        inside = [
            step
            for step in self.full.steps[start : stop + 1]
            if step in own or (step.target in CHECKS and not own.isdisjoint(_steps_in(step.args)))
        ]
        self.regions[number] = _Region(inside)
        repairs = self.full.draws[number].repairs
        if repairs and any(step.changes or step.random or step.updates for step in inside):
            raise _DiffersError("what is left out has effects of its own")
        for step in inside:
            step.skipped, step.repairs = 0 if repairs else number + 1, repairs
            self._region_of[step] = number
        if repairs:
            _note_asking(self.full.draws[number].value)

    def _choose(self, made: Any, instead: Any) -> None:
        """Note that another value goes on where the step that makes one is left out."""
        number = self._region_of.get(made) if isinstance(made, Step) else None
        if number is None:
            raise _DiffersError("more differs than what is left out")
        choices, draw = self.regions[number].choices, self.full.draws[number]
        if made not in choices:
            told, by = (None, instead, made), torch.where if draw.repairs else kept_unless
            choice = choices[made] = Step("call_function", by, told, {}, draw.scope, draw.source)
            choice.skipped, choice.repairs = 0 if draw.repairs else number + 1, draw.repairs
        elif identity(choices[made].args[1]) != identity(instead):
            raise _DiffersError("more differs than what is left out")

    def _rewritten(self) -> Recording:
        """The full recording in which all that follows a region uses its choices."""
        steps: list[Step] = []
        ends = {region.steps[-1]: number for number, region in self.regions.items()}
        starts = {region.steps[0]: number for number, region in self.regions.items()}
        flags: dict[int, Value] = {}
        for step in self.full.steps:
            if step in starts:
                number = starts[step]
                flags[number] = self._flag(number, steps)
            self._use_choices(step, self._region_of.get(step))
            steps.append(step)
            if step in ends:
                number = ends[step]
                for choice in self.regions[number].choices.values():
                    choice.args = (flags[number], *choice.args[1:])
                    self._use_choices(choice, number)
                    steps.append(choice)
        output = self._replaced(self.full.output, None)
        if any(step in self._region_of for step in _steps_in(output)):
            raise _DiffersError("more differs than what is left out")
        # What a run gives whose branches were chosen is not what the model gives.
        return replace(self.full, steps=tuple(steps), output=output, outcome=None)

    def _flag(self, number: int, steps: list[Step]) -> Value:
        """What is true if the steps of a region are left out; added to ``steps`` if it is a step."""
        draw = self.full.draws[number]
        if number not in self.taken:
            return draw.value
        flag = Step("call_function", torch.logical_not, (draw.value,), {}, draw.scope, draw.source)
        flag.repairs = draw.repairs
        steps.append(flag)
        return flag

    def _use_choices(self, step: Step, own: int | None) -> None:
        """Let a step use the choices of all regions but its own."""
        step.args = self._replaced(step.args, own)
        step.kwargs = self._replaced(step.kwargs, own)
        step.changes = self._replaced(step.changes, own)
        if any(self._region_of.get(source, own) != own for source in _steps_in((step.args, step.kwargs))):
            raise _DiffersError("more differs than what is left out")

    def _replaced(self, tree: Any, own: int | None) -> Any:
        """Arguments in which choices stand for what they choose."""
        if isinstance(tree, Step):
            number = self._region_of.get(tree)
            return tree if number in (None, own) else self.regions[number].choices.get(tree, tree)
        return _mapped(lambda part: self._replaced(part, own), tree)


def _segments(recording: Recording) -> list[list[Step]]:
    """The steps before the first branch, and those behind each; without checks, which are made once each."""
    places = [0, *(draw.place for draw in recording.draws), len(recording.steps)]
    return [
        [step for step in recording.steps[start:stop] if step.target not in CHECKS]
        for start, stop in zip(places, places[1:], strict=False)
    ]


def differences(mine: Any, theirs: Any, pairs: Mapping[Step, Step]) -> Iterator[tuple[Any, Any]]:
    """The innermost parts in which arguments differ from those of another recording."""
    if isinstance(mine, Expr) and isinstance(theirs, Expr) and mine.call == theirs.call:
        mine, theirs = (mine.args, mine.kwargs), (theirs.args, theirs.kwargs)
    if isinstance(mine, slice) and isinstance(theirs, slice):
        mine, theirs = (mine.start, mine.stop, mine.step), (theirs.start, theirs.stop, theirs.step)
    if isinstance(mine, dict) and isinstance(theirs, dict) and list(mine) == list(theirs):
        mine, theirs = list(mine.values()), list(theirs.values())
    if isinstance(mine, tuple | list) and isinstance(theirs, tuple | list) and len(mine) == len(theirs):
        for one, other in zip(mine, theirs, strict=True):
            yield from differences(one, other, pairs)
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
    if isinstance(value, Step):
        if value not in pairs:
            raise _DiffersError("more differs than what is left out")
        return pairs[value]
    return _mapped(lambda part: _translated(part, pairs), value)


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """A structure or an expression with each part changed; anything else as it is."""
    if isinstance(tree, Expr):
        return Expr(tree.call, tuple(map(change, tree.args)), {k: change(v) for k, v in tree.kwargs.items()})
    if isinstance(tree, slice):
        return slice(change(tree.start), change(tree.stop), change(tree.step))
    if isinstance(tree, dict):
        return {key: change(part) for key, part in tree.items()}
    return type(tree)(map(change, tree)) if type(tree) in (tuple, list) else tree


def _steps_in(tree: Any) -> set[Step]:
    """The steps whose results a structure contains, or computes with."""
    found = set[Step]()
    for value in all_values(tree):
        if isinstance(value, Step):
            found.add(value)
        elif isinstance(value, Expr):
            found |= _steps_in((value.args, value.kwargs))
    return found
