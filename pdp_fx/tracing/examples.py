"""Example inputs as a call, and variations of that call: other batch sizes, other sizes, other numbers."""

import logging
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain, combinations, count
from typing import Any, TypeGuard, TypeVar

import torch

from pdp_fx.errors import TraceError
from pdp_fx.tracing.structure import fresh_copy, kind_of_tensor, mapped, tags, tensors

ExampleInputs = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

TRIALS = 6
"""How many calls with other numbers are made of one."""


MOST_TOGETHER = 3
"""How many sizes of a call are changed at once."""

ROOM = 2**24
"""The most numbers that a tensor may get by having longer axes."""

GROWTH, FEW = 16, 2**17
"""How many times as many numbers a made-up tensor may have, and how many any may: attention, for one, takes
memory by the square of that."""

LARGE = 16
"""So many examples cost much more than two."""

SMALL = 64
"""Sizes up to this are small: nets may leave one pixel of them."""


def is_followed(argument: Any) -> TypeGuard[float]:
    """Whether an argument is a number that may be another at each call: a float that is finite."""
    return type(argument) is float and math.isfinite(argument)


@dataclass(frozen=True)
class ExampleCall:
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def fresh(self) -> "ExampleCall":
        """The same arguments with tensors of their own."""
        return ExampleCall(fresh_copy(self.args), {key: fresh_copy(arg) for key, arg in self.kwargs.items()})

    def cast(self, dtype: torch.dtype) -> "ExampleCall":
        """The call with another dtype of the floating-point tensors."""

        def changed(leaf: Any) -> Any:
            return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

        return self._mapped(changed)

    @property
    def batch(self) -> int:
        """How long the first axis of the first tensor is; 0 if there is none."""
        first = next(tensors((self.args, self.kwargs)), None)
        return first.shape[0] if first is not None and first.ndim else 0

    @property
    def has_places_elsewhere(self) -> bool:
        """Whether there are whole numbers, which may be indices, on another device than the CPU.

        An index out of range raises an error on the CPU, but makes a GPU unusable for the process, so such a
        call is not tried with other numbers or sizes.
        """
        given = tensors((self.args, self.kwargs))
        return any(tensor.device.type != "cpu" and not tensor.is_floating_point() for tensor in given)

    def others(self) -> "Iterator[ExampleCall]":
        """Calls with another batch size whose first example is the same, in the order to try them.

        Two examples are enough, unless this call has two. The last example differs from the first, because a
        graph that mixes two equal examples looks right. The last call repeats the first example, for models
        that refuse made-up ones.
        """
        if not self.batch:
            return
        if self.batch > 2:
            fewer = self._changed(lambda rows: rows[:2].clone())
            if fewer.tells_apart():
                yield fewer
                return
        kept = 2 if self.batch == 2 else 1
        for another in (_another, _another_number):
            more = self._changed(lambda rows, another=another: torch.cat([rows[:kept], another(rows[:1])]))
            if more.tells_apart():
                yield more
                break
        yield self._changed(lambda rows: torch.cat([rows[:kept], rows[:1]]))

    def beyond(self) -> "ExampleCall | None":
        """A call with more examples if those of `others` have fewer, and the other way round; None of one."""
        if self.batch <= 2:
            return self.first()
        return self._changed(lambda rows: torch.cat([rows, rows[:1]]))

    @property
    def shows_few_numbers(self) -> bool:
        """Whether other numbers may show more: some of these are whole, as lengths, or all equal."""
        return any(
            not tensor.is_floating_point() or bool((tensor == tensor.flatten()[0]).all())
            for tensor in tensors((self.args, self.kwargs))
            if tensor.numel()
        )

    def with_other_numbers(self, turn: int = 0) -> "Iterator[ExampleCall]":
        """Calls with numbers drawn from this call's; floats are scaled, and shifted in every second call.

        Args:
            turn: each turn draws others.
        """
        if self.has_places_elsewhere:
            return
        for seed in range(turn * TRIALS, (turn + 1) * TRIALS):
            generator, moved = torch.Generator().manual_seed(seed), seed % 2 == 1
            yield self._mapped(lambda leaf, g=generator, moved=moved: _drawn_from(leaf, g, moved))

    def with_other_floats(self) -> "Iterator[ExampleCall]":
        """Calls in which all arguments that are floats are other numbers; none if no argument is a float."""
        if not any(map(is_followed, (*self.args, *self.kwargs.values()))):
            return
        for scale, shift in ((0.37, 0.11), (0, 0), (0, 1)):

            def changed(given: Any, scale: float = scale, shift: float = shift) -> Any:
                # A model may be given whole numbers for floats.
                if not is_followed(given):
                    return given
                return scale * given + shift if scale else shift

            named = {name: changed(given) for name, given in self.kwargs.items()}
            yield ExampleCall(tuple(map(changed, self.args)), named)

    def smaller(self) -> "ExampleCall":
        """The call with three quarters of each number that is a float in a tensor."""
        return self._mapped(_smaller)

    def alike(self) -> "ExampleCall | None":
        """The call with one tensor in the place of all of its kind; None if no two are of a kind."""
        given = list(tensors((self.args, self.kwargs)))
        first = {kind_of_tensor(tensor): tensor for tensor in reversed(given)}
        if len(first) == len(given):
            return None
        return self._mapped(
            lambda leaf: first[kind_of_tensor(leaf)] if isinstance(leaf, torch.Tensor) else leaf
        )

    def without(self, given: torch.Tensor) -> "ExampleCall":
        """The call with None in the place of a tensor."""
        return self._mapped(lambda leaf: None if leaf is given else leaf)

    def tells_apart(self) -> bool:
        """Whether the last example of the batch differs from the first."""
        batches = [leaf for leaf in tensors((self.args, self.kwargs)) if is_batch(leaf, self.batch)]
        return any(not torch.equal(rows[0], rows[-1]) for rows in batches)

    def first(self) -> "ExampleCall | None":
        """A call with the first example alone; None if this is one already."""
        return self._changed(lambda rows: rows[:1].clone()) if self.batch > 1 else None

    def of_other_batches(self) -> "Iterator[ExampleCall]":
        """Calls with the examples of this one, repeated or cut, in batches of a few other sizes."""
        for size in (1, 3, 5, 8):
            if self.batch not in (0, size):
                yield self._changed(lambda rows, size=size: torch.cat([rows] * size)[:size])

    def of_other_ranks(self, lengths: Iterable[int] = ()) -> "Iterator[ExampleCall]":
        """Calls with one axis more, along which tensors differ, and one with the first example alone.

        Args:
            lengths: how long the axis is that rows of numbers get in the calls after that.
        """
        if not self.batch or self.has_places_elsewhere:
            return
        yield self._changed(lambda rows: torch.stack([rows, _another(rows)]))
        yield self._changed(lambda rows: rows[0])
        for length in lengths if all(leaf.ndim == 2 for leaf in tensors((self.args, self.kwargs))) else ():
            yield self._changed(
                lambda rows, length=length: torch.stack([rows, _another(rows)] * length, 1)[:, :length]
            )

    def sizes(self) -> frozenset[int]:
        """The sizes of all axes but the batch, without those of empty tensors."""
        found = (size for leaf in tensors((self.args, self.kwargs)) for _, size in self.other_axes(leaf))
        return frozenset(size for size in found if size)

    def resized(self, size: int, least: int = 1) -> "Iterator[ExampleCall]":
        """Calls in which all axes of one size, except the batch, have another size, the cheapest first.

        Three of the sizes are multiples of the same power of two, for nets that halve images several times.

        Args:
            size: the size.
            least: the smallest that it may become.
        """
        for other in _sizes_from(least, size):
            yield from self._if_small(self._mapped, partial(self._resize, size=size, other=other))

    def resized_alone(self, size: int, least: int = 1) -> "Iterator[Iterator[ExampleCall]]":
        """For each axis of one size the calls in which that axis alone has another, if there are several.

        Args:
            size: as for `resized`.
            least: as for `resized`.
        """
        given = list(tensors((self.args, self.kwargs)))
        places = [(leaf, axis) for leaf in given for axis, length in self.other_axes(leaf) if length == size]
        for place in places if len(places) > 1 else ():
            ways = ((*place, other) for other in _sizes_from(least, size))
            yield chain.from_iterable(self._if_small(self._lengthened, *way) for way in ways)

    def _lengthened(self, old: torch.Tensor, axis: int, length: int) -> "ExampleCall":
        """The call with another length of one axis of a tensor."""
        return self._mapped(lambda leaf: _as_long(old, axis, length) if leaf is old else leaf)

    def sizes_taken(self, takes: "Callable[[ExampleCall], object]") -> frozenset[int]:
        """The sizes of axes but the batch that may be others, all axes of one size together.

        Args:
            takes: raises an error on a call that is refused.
        """
        return frozenset(size for size in self.sizes() if first_taken(self.resized(size), takes))

    def apart(self, free: Collection[int], single: bool, larger: bool = False) -> "Iterator[ExampleCall]":
        """Calls with another batch size and sizes that are equal on this call by chance, the likeliest first.

        Of images as high as wide the width becomes another than the height, then both become smaller. Axes of
        one index become longer in the first calls, for they may hide any order. In the last call only the
        batch is another, for models that take no other size.

        Args:
            free: the sizes that may be others.
            single: whether this last call is made if this call has a single example, too.
            larger: whether small sizes are doubled and trebled, too, for nets that leave one pixel of them.
        """
        sizes = self.sizes()
        for call, plain in self._longer():
            for size, *more in _together(free):
                if more:
                    yield from self._if_small(reduce, ExampleCall._spread_apart, [size, *more], call)
                    continue
                one, another = _two_others(size, {1, call.batch, *sizes, *call.sizes()})
                ways = [(another, one), (one, one)]
                for other, width in [*ways, (3 * size, 2 * size)] if larger and size <= SMALL else ways:
                    yield from self._if_small(call._spread, size, other, width)
            if not plain or self.batch > 1 or single:
                yield call

    def unlike(self, free: Collection[int], numbers: Collection[int]) -> "Iterator[ExampleCall]":
        """Calls with another batch size and two sizes that share no factor with each other or with numbers.

        Of sizes that share factors, such as 12 channels and 8 pixels, a view may mix fewer than it can. Half
        and a quarter of the sizes, as they are behind strides, are odd, too, and of large ones strides leave
        more than one, and not as many of both.

        Args:
            free: the sizes that may be others.
            numbers: other sizes of the model, as those of its weights.
        """
        taken = {self.batch, *self.sizes(), *numbers} - {0}
        fits = lambda prime: all(number % prime for number in taken)  # noqa: E731
        rows = next(filter(fits, _primes()))
        odd = lambda prime: prime % 8 == 7 and prime != rows and fits(prime)  # noqa: E731
        for call, plain in self._longer(rows):
            for sizes in _together(free):
                spread = lambda made, pair: made._spread(*pair)  # noqa: E731
                yield from self._if_small(reduce, spread, _pairs(sizes, odd), call)
            if not plain:
                yield call

    def _longer(self, rows: int = 0) -> "Iterator[tuple[ExampleCall, bool]]":
        """Calls with another batch size, one with longer axes of one index first; with each, whether not.

        Args:
            rows: the batch size; 0 stands for the smallest that is the size of nothing yet.
        """
        if not self.batch or self.has_places_elsewhere:
            return
        sizes = self.sizes()
        rows = rows or next(size for size in count(2) if size != self.batch and size not in sizes)
        many = self._changed(lambda leaf: torch.cat([leaf] * -(-rows // self.batch))[:rows])
        if 1 in sizes:
            one, another = _two_others(1, {rows, *sizes})
            yield many._spread(1, another, one), False
        yield many, True

    def _if_small(self, make: "Callable[..., ExampleCall]", *args: Any) -> "Iterator[ExampleCall]":
        """A call with other sizes, if its tensors are not too large: several short axes may become long."""
        try:
            made = make(*args)
        except _TooLargeError:
            return
        pairs = zip(*(tensors((call.args, call.kwargs)) for call in (made, self)), strict=True)
        if all(larger.numel() <= max(GROWTH * leaf.numel(), FEW) for larger, leaf in pairs):
            yield made

    def _spread_apart(self, size: int) -> "ExampleCall":
        """A call in which axes of one size have two others that nothing has."""
        one, another = _two_others(size, {1, self.batch, *self.sizes()})
        return self._spread(size, another, one)

    def _spread(self, size: int, other: int, width: int) -> "ExampleCall":
        """A call in which axes of one size have another one: the last axis ``width``."""
        return self._mapped(lambda leaf: self._resize(leaf, size, other, width))

    def other_axes(self, leaf: Any) -> "Iterator[tuple[int, int]]":
        """The axes of a tensor that are not the batch's, and how long they are."""
        if isinstance(leaf, torch.Tensor):
            yield from (axis for axis in enumerate(leaf.shape) if axis[0] or axis[1] != self.batch)

    def _resize(self, leaf: Any, size: int, other: int, width: int = 0) -> Any:
        """Shorten the axes of this size by cutting off their end, or lengthen them by repetition.

        Args:
            leaf: a tensor; anything else is returned as it is.
            size: how long the axes are.
            other: how long they become.
            width: how long the last axis becomes if it is one of them; 0 stands for ``other``.
        """
        for axis in [axis for axis, length in self.other_axes(leaf) if length == size]:
            leaf = _as_long(leaf, axis, width if width and axis == leaf.ndim - 1 else other)
        return leaf

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "ExampleCall":
        def changed(leaf: Any) -> Any:
            if not is_batch(leaf, self.batch):
                return leaf
            return change(leaf.detach()).requires_grad_(leaf.requires_grad)

        return self._mapped(changed)

    def _mapped(self, changed: Callable[[Any], Any]) -> "ExampleCall":
        args, kwargs = mapped(changed, (self.args, dict(self.kwargs)))
        return ExampleCall(args, kwargs)


def first_taken(
    calls: Iterable[ExampleCall],
    run: Callable[[ExampleCall], Result],
    takes: Callable[[ExampleCall], object] | None = None,
) -> tuple[ExampleCall, Result] | None:
    """The first of these calls that a model does not refuse, and the result; None if it refuses all.

    Of a large batch two examples are tried before: a net made for one size of images refuses those, too.

    Args:
        calls: made-up calls, in the order to try them.
        run: runs the model on a call.
        takes: fails on what the model refuses, and costs less.
    """
    for call in calls:
        large = call.batch > LARGE
        try:
            if takes is not None or large:
                (takes or run)(call._changed(lambda rows: rows[:2]) if large else call)
            return call, run(call)
        except Exception as err:  # noqa: BLE001 the example is ours, not the user's
            _log.info("another example is refused: %s", err)
    return None


def _other_sizes(size: int) -> tuple[int, ...]:
    """Half of a size, and two near it that are multiples of the same power of two; none is 0."""
    power = size & -size
    found = (size // 2, size - power, size + (power if power < size else max(size // 2, 1)))
    return tuple(other for other in dict.fromkeys(found) if other)


def _sizes_from(least: int, size: int) -> list[int]:
    """What a size is replaced by, the smallest first, from ``least`` on."""
    return [other for other in dict.fromkeys((*_other_sizes(size), 2 * size)) if other >= least]


class _TooLargeError(Exception):
    """A made-up example would have a tensor that becomes larger than `ROOM`."""


def _as_long(leaf: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    """A tensor with another length along an axis: cut off at its end, or repeated.

    Raises:
        _TooLargeError: it is to be longer, and would have more than `ROOM` numbers.
    """
    if length > leaf.shape[axis] and leaf.numel() // leaf.shape[axis] * length > ROOM:
        raise _TooLargeError
    whole = torch.cat([leaf.detach()] * -(-length // leaf.shape[axis]), axis)
    return whole.narrow(axis, 0, length).clone().requires_grad_(leaf.requires_grad)


def _together(sizes: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Which sizes to change together: as many as possible first, and the largest first."""
    largest = sorted(set(sizes) - {1}, reverse=True)
    for together in range(min(len(largest), MOST_TOGETHER), 0, -1):
        yield from combinations(largest, together)


def _pairs(sizes: Iterable[int], fits: Callable[[int], bool]) -> list[tuple[int, int, int]]:
    """With each size two primes that fit, from three eighths and a quarter of it on; each is used once."""
    found, used = list[tuple[int, int, int]](), set[int]()
    for size in sizes:
        free = (prime for prime in _primes() if prime >= size // 4 and prime not in used and fits(prime))
        one = next(free)
        another = next(prime for prime in free if prime > one + size // 8)
        used |= {one, another}
        found.append((size, another, one))
    return found


def _two_others(size: int, used: Container[int]) -> tuple[int, int]:
    """Two sizes in the place of one, none of which is used."""
    free = (other for other in chain(_other_sizes(size), count(size)) if other not in used)
    return next(free), next(free)


def _primes() -> Iterator[int]:
    """Primes from 5 on."""
    return (n for n in count(5, 2) if all(n % divisor for divisor in range(3, math.isqrt(n) + 1, 2)))


def _another(rows: torch.Tensor) -> torch.Tensor:
    """Another example: this one reversed or, if that is the same, with larger numbers."""
    backwards = rows.flip(-1) if rows.ndim > 1 else rows
    return backwards + 1 if rows.is_floating_point() and torch.equal(backwards, rows) else backwards


def _another_number(rows: torch.Tensor) -> torch.Tensor:
    """Another example for one whose whole numbers are all equal; they may be indices, so they change by 1."""
    if rows.is_floating_point() or rows.is_complex() or rows.dtype is torch.bool:
        return rows
    return torch.where(rows > 0, rows - 1, rows + 1)


def _drawn_from(leaf: Any, generator: torch.Generator, moved: bool) -> Any:
    """Numbers drawn from those of a tensor; if these are all equal, numbers near them."""
    if not isinstance(leaf, torch.Tensor) or not leaf.numel():
        return leaf
    numbers, count = leaf.detach().flatten(), leaf.numel()
    places = torch.randint(count, (count,), generator=generator).to(leaf.device)
    shares = torch.rand(count, generator=generator).to(leaf.device)
    drawn, constant = numbers[places], bool((numbers == numbers[0]).all())
    if leaf.is_floating_point():
        drawn = (drawn + shares if constant else drawn * (0.5 + shares)).to(leaf.dtype)
        drawn = drawn - drawn[0] if moved else drawn
    elif constant:
        # Of lengths that are 1 there is nothing below, of the last index nothing above.
        other = drawn + 1 if moved and drawn.dtype is not torch.bool else _another_number(drawn)
        drawn = torch.where(shares < 0.5, other, drawn)
    return drawn.reshape(leaf.shape).requires_grad_(leaf.requires_grad)


def _smaller(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    return (0.75 * leaf.detach()).requires_grad_(leaf.requires_grad)


def is_batch(leaf: Any, size: int) -> bool:
    """Whether something is a tensor with a first axis of this size."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == size


def example_call(example_inputs: object) -> ExampleCall:
    """Read example inputs: a tensor is one positional argument, a tuple several, a mapping has keyword ones.

    Raises:
        TraceError: they are something else, cannot be copied, or are tensors with attributes of their own.
    """
    call = _as_call(example_inputs)
    try:
        call.fresh()
    except Exception as err:
        raise TraceError(
            f"the example inputs cannot be copied ({type(err).__name__}: {err}), as they are for each run of "
            "the model; give what copy.deepcopy can copy"
        ) from err
    for tensor in tensors((call.args, call.kwargs)):
        tag = next(iter(tags(tensor)), None)
        if tag is not None:
            raise TraceError(
                f"an example input has an attribute {tag!r} of its own, which a graph does not see; give "
                "it as another input"
            )
    return call


def _as_call(example_inputs: object) -> ExampleCall:
    if isinstance(example_inputs, torch.Tensor):
        return ExampleCall((example_inputs,), {})
    if isinstance(example_inputs, tuple):
        return ExampleCall(example_inputs, {})
    if isinstance(example_inputs, Mapping):
        return ExampleCall((), {str(key): arg for key, arg in example_inputs.items()})
    raise TraceError(
        "example_inputs must be a tensor, a tuple of positional arguments or a dict of keyword arguments, "
        f"not {type(example_inputs).__name__}"
    )
