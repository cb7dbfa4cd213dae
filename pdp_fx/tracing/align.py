"""Pairing the steps of the recordings of the two modes, so that one graph can be written from both."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property

from pdp_fx.tracing.steps import CHECKS, Recording, Scope, Step, Whole

_NONE = frozenset[tuple[str, bool]]()


@dataclass(frozen=True)
class Pair:
    """A step in eval mode and its counterpart in training mode; None for the mode that has no such step."""

    in_eval: Step | None
    in_train: Step | None

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of the pair: one or two."""
        return tuple(step for step in (self.in_eval, self.in_train) if step is not None)

    @property
    def only(self) -> Step | None:
        """The step if it happens in one mode only, else None."""
        if self.in_eval is not None and self.in_train is not None:
            return None
        return self.in_eval or self.in_train


@dataclass(frozen=True)
class Alignment:
    """Both recordings, and their steps as pairs in an order that respects the order of each recording.

    Attributes:
        in_eval: the recording in eval mode.
        in_train: that in training mode.
        pairs: the steps of both.
        alike: modules that the graph must find in one mode each time.
    """

    in_eval: Recording
    in_train: Recording
    pairs: tuple[Pair, ...]
    alike: frozenset[tuple[str, ...]] = frozenset()

    def owner(self, pair: Pair) -> str:
        """The module that decides on a step of one mode: the innermost that both modes call."""
        return self.decides(pair).path

    def flags_in(self, start: Scope) -> tuple[str, ...]:
        """The modules by whose flags the steps in a call of a module differ, always in the same order.

        They are those whose flags the innermost module reads that reads any which training sets; the module
        itself if none does.
        """
        scope: Scope | None = start
        while scope is not None:
            asked = self._asked_in(scope.path)
            if asked:
                return tuple(sorted(asked))
            scope = scope.parent
        return (start.path,)

    def flags_around(self, scope: Scope) -> frozenset[str]:
        """The modules whose flags are read in a call of a module, or in those that it happens in."""
        found = self.flags_in(scope)
        return frozenset(found) & self.asked

    @cached_property
    def asked(self) -> frozenset[str]:
        """All modules whose flags any reads, and training sets."""
        paths = self.in_eval.flags.keys() | self.in_train.flags.keys()
        return frozenset[str]().union(*map(self._asked_in, paths))

    def _asked_in(self, path: str) -> set[str]:
        in_eval, in_train = (each.flags.get(path, _NONE) for each in (self.in_eval, self.in_train))
        return {owner for owner, _ in (*in_eval, *in_train)} - {owner for owner, on in in_train if not on}

    def asked_together(self) -> set[tuple[str, ...]]:
        """The modules whose flags a module reads, or is told in a call, where they are more than one."""
        read = dict[str, set[str]]()
        for recording in (self.in_eval, self.in_train):
            for path, flags in recording.flags.items():
                read.setdefault(path, set()).update(owner for owner, _ in flags)
        together = set(map(frozenset, read.values()))
        for scope, told in self.in_train.scopes.items():
            caller = scope.parent
            if scope.path in read and caller is not None and told != self.in_eval.scopes.get(scope, told):
                together.add(frozenset({*read[scope.path], *self.flags_in(caller)}))
        return {tuple(sorted(owners)) for owners in together if len(owners) > 1}

    def decides(self, pair: Pair) -> Scope:
        """The innermost call of a module that happens in both modes and has the pair's steps in it."""
        scope = pair.steps[0].scope
        for recording in (self.in_eval, self.in_train):
            while scope not in recording.scopes and scope.parent is not None:
                scope = scope.parent
        return scope


def align(
    in_eval: Recording, in_train: Recording, alike: frozenset[tuple[str, ...]] = frozenset()
) -> Alignment:
    """Pair the steps of two recordings of one model; ``alike`` as in `Alignment`."""
    left, right = in_eval.steps, in_train.steps
    pairs: list[Pair] = []
    for tag, i, i_end, j, j_end in opcodes(list(map(kind_of_step, left)), list(map(kind_of_step, right))):
        if tag == "equal":
            pairs += [Pair(a, b) for a, b in zip(left[i:i_end], right[j:j_end], strict=True)]
            continue
        pairs += [Pair(a, None) for a in left[i:i_end]]
        pairs += [Pair(None, b) for b in right[j:j_end]]
    return Alignment(in_eval, in_train, tuple(pairs), alike)


def opcodes(left: Sequence[Hashable], right: Sequence[Hashable]) -> Sequence[tuple[str, int, int, int, int]]:
    """How one sequence becomes another, as `difflib.SequenceMatcher.get_opcodes` says it."""
    if left == right:
        return [("equal", 0, len(left), 0, len(right))]
    return SequenceMatcher(None, left, right, autojunk=False).get_opcodes()


def kind_of_step(step: Step) -> Hashable:
    """A key that steps share which do the same in the same call of a module, whatever they are given.

    Checks do the same where they say the same if they fail.
    """
    target = step.target if isinstance(step.target, str | Whole) else id(step.target)
    said = step.args[1] if step.target in CHECKS else ""
    return step.op, target, step.scope, len(step.args), tuple(step.kwargs), said
