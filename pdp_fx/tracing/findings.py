"""What is known of a model from earlier recordings; each new one starts from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pdp_fx.tracing.flags import MixedModesError
from pdp_fx.tracing.objects import Bound
from pdp_fx.tracing.settings import Question, Setting, SettingError
from pdp_fx.tracing.sizes import Casts, Place
from pdp_fx.tracing.steps import LostDtypeError, Recording, UnprovenError, Whole, is_given


@dataclass
class Sizes:
    """What a model does with sizes, and which sizes its graph must insist on.

    Attributes:
        read: whether it reads sizes.
        compared: whether it compares them with each other or with 1.
        hidden: whether code that is not looked into may read them.
        batch: the only batch size that the graph may accept; None if any.
        held: the sizes of other input axes that the graph must insist on.
    """

    read: bool = False
    compared: bool = False
    hidden: bool = False
    batch: int | None = None
    held: frozenset[int] = frozenset()


@dataclass
class Findings:
    """The parts to keep whole, and the recordings made so far.

    Attributes:
        opaque: the modules, methods and functions to keep whole, each with the reason.
        tried: all parts that were ever kept whole, which must not be proposed again.
        asked: whether the model asked if it is being compiled.
        asks: what the model asks of its caller's settings, each with a line that does.
        as_if_cast: whether the model is told that autocast is on, and so leaves it where it leaves it at all.
        alike: modules that must be in one mode, each several whose flags the model reads in one place.
        holds: the settings whose answers the graph must find as they were where the model asks.
        holds_dtypes: whether the graph insists on dtypes of which it is not known what becomes.
        sizes: what the model does with sizes; kept when the model is traced anew.
        lasting: the parts to keep whole, with the reasons, whenever the model is traced anew.
        casts: the globals of code in which `int` and `float` are replaced by functions that return live
            numbers, as in `Session.cast_in`; None if they are never replaced.
        follows_ragged: whether sizes that depend on the numbers in a tensor may become live numbers.
        follows_draws: whether branches on random numbers, or on whether numbers are finite, become choices.
        put_in_eval: the modules that the model puts into eval mode as it runs; recordings find them so.
        may_put_in_eval: whether modules may be noted as such.
        follows_given: whether floats among the inputs may become live numbers.
        returns_numbers: whether code that is not looked into returns numbers.
        follows_returned: whether these become live numbers.
        may_follow_returned: whether they may, where they do not.
        met_ragged: whether the model decides by sizes that depend on the numbers in a tensor.
        checks_ragged: whether such decisions become checks, for a model whose own `forward` makes them.
        insisted: where the model reads numbers of which Python makes plain ones unseen.
        insists_enough: whether those have been looked for, and found.
        apart: whether inputs of one kind must be tensors of their own.
        ordered: whether the keys of dicts among the inputs must be in the order of the example.
        asked_for: the modes, and the places among the tensors given, of those tensors that a mode does not
            use and does something else without.
        left_out: the arguments without which eval mode does the same; they are None in its recording.
        unproven: the lines whose branches on whether anything is selected may do more than leave work out.
    """

    opaque: dict[Whole, str] = field(default_factory=dict[Whole, str])
    tried: set[Whole] = field(default_factory=set[Whole])
    asked: bool = False
    asks: dict[Question, str] = field(default_factory=dict[Question, str])
    as_if_cast: bool = False
    alike: frozenset[tuple[str, ...]] = frozenset()
    holds: frozenset[Setting] = frozenset()
    holds_dtypes: bool = False
    sizes: Sizes = field(default_factory=Sizes)
    lasting: dict[Whole, str] = field(default_factory=dict[Whole, str])
    casts: Casts | None = field(default_factory=dict[tuple[int, str], dict[str, Any]])
    follows_ragged: bool = True
    follows_draws: bool = True
    put_in_eval: frozenset[str] = frozenset()
    may_put_in_eval: bool = True
    follows_given: bool = True
    returns_numbers: bool = False
    follows_returned: bool = False
    may_follow_returned: bool = True
    met_ragged: bool = False
    checks_ragged: bool = False
    insisted: frozenset[Place] = frozenset()
    insists_enough: bool = False
    apart: bool = False
    ordered: bool = False
    asked_for: frozenset[tuple[bool, int]] = frozenset()
    left_out: frozenset[str] = frozenset()
    unproven: frozenset[str] = frozenset()
    _made: dict[bool, tuple[Recording, int]] = field(default_factory=dict[bool, tuple[Recording, int]])
    _bound: dict[tuple[int, str], Bound] = field(default_factory=dict[tuple[int, str], Bound])

    def __post_init__(self) -> None:
        for whole, reason in self.lasting.items():
            if whole not in self.tried:
                self.keep_whole(whole, reason)

    def anew(self, sizes: Sizes | None = None) -> Findings:
        """The findings to trace the model anew with: ``lasting``, and these or the given ``sizes``."""
        sizes = self.sizes if sizes is None else sizes
        made = Findings(sizes=sizes, lasting=self.lasting)
        made.follows_draws, made.checks_ragged = self.follows_draws, self.checks_ragged
        made.unproven, made.as_if_cast = self.unproven, self.as_if_cast
        made.apart, made.ordered = self.apart, self.ordered
        made.asked_for, made.left_out = self.asked_for, self.left_out
        made.follows_given, made.follows_returned = self.follows_given, self.follows_returned
        made.may_follow_returned = self.may_follow_returned
        made.put_in_eval, made.may_put_in_eval = self.put_in_eval, self.may_put_in_eval
        made.holds, made.alike, made.insisted = self.holds, self.alike, self.insisted
        made.holds_dtypes = self.holds_dtypes
        return made

    def once_more(self, **more: Any) -> Findings:
        """The findings to record the model once more with, of which these attributes are others."""
        return replace(self, _made={}, **more)

    def keeping(self, more: Mapping[Whole, str]) -> Findings:
        """The findings to trace the model anew with more parts kept whole for good, for these reasons."""
        return Findings(
            lasting={**self.lasting, **more},
            apart=self.apart,
            ordered=self.ordered,
            asked_for=self.asked_for,
            follows_returned=self.follows_returned,
            may_follow_returned=self.may_follow_returned,
            left_out=self.left_out,
        )

    def aside(self) -> Findings:
        """Findings to record with without adding to these."""
        return replace(
            self,
            opaque=dict(self.opaque),
            tried=set(self.tried),
            sizes=replace(self.sizes),
            casts=None if self.casts is None else dict(self.casts),
        )

    def plainer(self, err: Exception) -> Findings | None:
        """The findings to trace the model anew with less of it followed; None if there is nothing to leave.

        Args:
            err: why tracing has failed.
        """
        asked = {asked.source for made, _ in self._made.values() for asked in made.asked}
        if asked:
            lines = {err.source} if isinstance(err, UnprovenError) else asked
            return replace(self.anew(), unproven=self.unproven | lines)
        if isinstance(err, MixedModesError):
            held = err.together in self.alike
            return None if held else self.once_more(alike=self.alike | {err.together})
        if isinstance(err, LostDtypeError):
            return None if self.holds_dtypes else self.once_more(holds_dtypes=True)
        if isinstance(err, SettingError):
            if err.setting is Setting.AUTOCAST and not self.as_if_cast:
                return replace(self.anew(), as_if_cast=True)
            held = err.setting in self.holds or not err.can_be_held
            return None if held else self.once_more(holds=self.holds | {err.setting})
        if self.put_in_eval:
            return replace(self.anew(), put_in_eval=frozenset[str](), may_put_in_eval=False)
        if self.follows_returned:
            return replace(self.anew(), follows_returned=False, may_follow_returned=False)
        if self.follows_given and any(
            is_given(step) for made, _ in self._made.values() for step in made.steps
        ):
            return replace(self.anew(), follows_given=False)
        if self.met_ragged and not self.checks_ragged:
            return replace(self.anew(), checks_ragged=True)
        if self.follows_ragged and any(step.sized for made, _ in self._made.values() for step in made.steps):
            return replace(self.anew(), follows_ragged=False)
        if self.casts:
            return replace(self.anew(), follows_ragged=self.follows_ragged, casts=None)
        if self.follows_draws and any(made.draws or made.draws_outside for made, _ in self._made.values()):
            self.follows_draws = False
            return replace(self.anew(), follows_ragged=self.follows_ragged, casts=self.casts)
        # What a method that is kept whole reads may be set by one of its module that is not.
        modules = {
            Whole(whole.path): why for whole, why in self.opaque.items() if whole.path and whole.method
        }
        if not self.tried.issuperset(modules):
            plainest = replace(self.anew(), follows_ragged=self.follows_ragged, casts=self.casts)
            return replace(plainest, lasting=self.lasting | modules)
        return None

    def keep_whole(self, whole: Whole, reason: str) -> None:
        """Keep a module or method whole from now on."""
        self.tried.add(whole)
        self.opaque[whole] = reason

    def bound(self, thing: Any, method: str) -> Bound:
        """The one `Bound` of a method of an object, so that two recordings hold the same."""
        return self._bound.setdefault((id(thing), method), Bound(thing, method))

    def note_casts(self, namespaces: Casts) -> None:
        """Note where `int` and `float` were called on live numbers."""
        if self.casts is not None:
            self.casts |= namespaces

    @property
    def can_begin_to_follow(self) -> bool:
        """Whether numbers that parts kept whole return are not followed, but may be."""
        return self.may_follow_returned and not self.follows_returned

    @property
    def knowledge(self) -> int:
        """A number that grows with everything learned, to tell outdated recordings."""
        sets = (self.tried, self.casts or (), self.insisted, self.put_in_eval)
        return sum(map(len, sets)) + self.follows_returned

    def note(self, training: bool, recording: Recording, knowledge: int) -> None:
        """Note a recording of a mode, made when `knowledge` had this value."""
        self._made[training] = recording, knowledge

    def recording(self, training: bool) -> Recording | None:
        """The recording of a mode, or None if something has been learned since."""
        made = self._made.get(training)
        return made[0] if made is not None and made[1] == self.knowledge else None

    def forget(self) -> None:
        """Forget the recordings made so far."""
        self._made.clear()

    def leave_out(self, arguments: frozenset[str]) -> None:
        """Leave these arguments out of the recording of eval mode, which is made again."""
        self.left_out |= arguments
        self._made.pop(False, None)

    def is_new(self) -> bool:
        """Whether something has been learned since the recording of either mode."""
        return self.recording(False) is None or self.recording(True) is None
