"""How reads of a tensor's metadata and numbers are recorded: sizes, devices, dtypes, items, truth values."""

import operator
from typing import Any

import torch

from pdp_fx.ops.data import data_of
from pdp_fx.tracing import functions
from pdp_fx.tracing.checks import refuse_ragged
from pdp_fx.tracing.expressions import (
    goes_by_rank,
    multiplies_sizes,
    only_checks,
    only_judged,
    only_says,
    only_unpacks,
    uses_beyond,
)
from pdp_fx.tracing.recorder import Args, Call, Kwargs, Recorder
from pdp_fx.tracing.selecting import asks_any
from pdp_fx.tracing.settings import HELD, is_users_question, note_asked_tensor
from pdp_fx.tracing.shapes import check_step, length_of
from pdp_fx.tracing.sizes import plain
from pdp_fx.tracing.skipping import is_drawn, reads
from pdp_fx.tracing.source import asker, source_line, user_frame
from pdp_fx.tracing.steps import (
    TRUTH,
    Expr,
    NumberReadError,
    Step,
    UnrecordableError,
    Value,
    is_data,
    is_input,
    is_ragged,
)
from pdp_fx.tracing.structure import LiveShape, kind_of_tensor
from pdp_fx.tracing.watch import storage_of


def called(recorder: Recorder, function: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run a torch function, and record it unless it only looks at metadata."""
    name = functions.name_of(function)
    recorder.findings.sizes.read |= name in functions.SIZES
    if name in functions.OF_GRADIENTS and not functions.is_setter(function):
        note_asked_tensor(recorder, args[0], name)
    elif name == "grad" and function.__name__ == "__get__" and is_users_question():
        raise UnrecordableError("looks at the gradient of a tensor")
    if functions.is_setter(function):
        if name == "requires_grad":
            return recorder.function(torch.Tensor.requires_grad_, args, kwargs)
        if name == "data" and kind_of_tensor(args[0]) == kind_of_tensor(args[1]):
            return _overwrite(recorder, *args)
        raise UnrecordableError(f"sets the attribute {name} of a tensor")
    if name in functions.SIZES and recorder.origins.is_ragged(args):
        if not recorder.findings.follows_ragged or name not in functions.LIVE_SIZES:
            sizes = recorder.run(function, args, kwargs)
            raise NumberReadError(f"reads a size that depends on the numbers in a tensor ({name})", sizes)
        recorder.origins.note_sized(args[0])
    read = _READS.get(name)
    if read is not None and args and isinstance(args[0], torch.Tensor):
        return read(recorder, *args, **kwargs)
    if functions.only_looks(name, len(args) + len(kwargs)):
        return recorder.run(function, args, kwargs)
    result = recorder.function(function, args, kwargs)
    if name == "squeeze" and len(args) + len(kwargs) == 1:
        _hold_rank(recorder, result)
    kind = name.partition(".")[0].removeprefix("unsafe_")
    if kind in ("split", "unbind", "chunk"):
        _check_parts(recorder, (*args[1:], *kwargs.values()) if kind == "split" else (), result)
    return result


def _hold_rank(recorder: Recorder, squeezed: torch.Tensor) -> None:
    """Add a check of how many axes are left: a batch of one loses the first, and code may go by that.

    If the graph turns out to do what the model does there, the check goes.
    """
    recorder.findings.sizes.read = True
    rank = recorder.run(torch.Tensor.dim, (squeezed,), {})
    recorder.checks.decided(Expr(operator.eq, (Expr("dim", (recorder.origins.value(squeezed),)), rank)))


def _rank(recorder: Recorder, tensor: torch.Tensor) -> int:
    """How many axes a tensor has."""
    rank: int = recorder.run(torch.Tensor.dim, (tensor,), {})
    if is_users_question():
        hold_ranks(recorder)
    return rank


def hold_ranks(recorder: Recorder) -> None:
    """Have the graph check that the inputs have as many axes as they had, by which the model may go."""
    if not recorder.inside and not recorder.asks_rank:
        recorder.asks_rank = source_line() or "the model"


def counted(recorder: Recorder, number: Any) -> None:
    """Add a check that a number which a loop starts from, counts up to or steps by is the same."""
    if not recorder.inside and not is_data(number.value):
        recorder.guarded(_as_often, recorder, number.value, plain(number))


def _check_parts(recorder: Recorder, told: Args, parts: Any) -> None:
    """Add a check of the number of parts, unless their sizes are given or unpacking them checks it."""
    frame = user_frame()
    sizes = any(isinstance(argument, list | tuple) for argument in told)
    if not sizes and not (frame is not None and only_unpacks(frame)):
        made = recorder.steps[-1]
        recorder.parts.fell(made, len(parts), _as_often(recorder, *length_of(made, parts)))


def _as_often(recorder: Recorder, value: Value, number: int) -> Step:
    if is_ragged(value):
        refuse_ragged("goes up to", value)
    source = source_line()
    message = f"{source or 'the model'} goes up to {number} in this graph; "
    message += "to go elsewhere, trace with example_inputs that do"
    check = check_step([(value, number)], message, recorder.scope, source)
    recorder.steps.append(check)
    return check


def _shape(recorder: Recorder, tensor: torch.Tensor) -> tuple[int, ...]:
    value = recorder.origins.value(tensor)
    sizes = recorder.run(torch.Tensor.size, (tensor,), {})
    found = [recorder.live(number, "size", value, axis) for axis, number in enumerate(sizes)]
    frame = user_frame()
    if frame is not None and goes_by_rank(frame) and is_users_question():
        hold_ranks(recorder)
    return LiveShape(found) if frame is not None and multiplies_sizes(frame) else torch.Size(found)


def _size(recorder: Recorder, tensor: torch.Tensor, dim: int | None = None) -> Any:
    if dim is None:
        return _shape(recorder, tensor)
    if plain(dim) < 0 and is_users_question():
        hold_ranks(recorder)
    sizes = recorder.run(torch.Tensor.size, (tensor,), {})
    axis = range(len(sizes))[plain(dim)]
    return recorder.live(sizes[axis], "size", recorder.origins.value(tensor), axis)


def _numel(recorder: Recorder, tensor: torch.Tensor) -> Any:
    return recorder.live(
        recorder.run(torch.Tensor.numel, (tensor,), {}), "numel", recorder.origins.value(tensor)
    )


def _stride(recorder: Recorder, tensor: torch.Tensor, dim: int | None = None) -> Any:
    """How far apart neighbours are in memory, which follows from sizes."""
    value = recorder.origins.value(tensor)
    strides = recorder.run(torch.Tensor.stride, (tensor,), {})
    found = tuple(recorder.live(number, "stride", value, axis) for axis, number in enumerate(strides))
    return found if dim is None else found[dim]


def _offset(recorder: Recorder, tensor: torch.Tensor) -> Any:
    offset = recorder.run(torch.Tensor.storage_offset, (tensor,), {})
    return recorder.live(offset, "storage_offset", recorder.origins.value(tensor))


def _element_size(recorder: Recorder, tensor: torch.Tensor) -> Any:
    bytes_ = recorder.run(torch.Tensor.element_size, (tensor,), {})
    return recorder.live(bytes_, "element_size", recorder.origins.value(tensor))


def _bytes(recorder: Recorder, tensor: torch.Tensor) -> Any:
    return _numel(recorder, tensor) * _element_size(recorder, tensor)


def _is_same_size(recorder: Recorder, tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one shape; the graph checks that it is so again."""
    same: bool = recorder.run(torch.Tensor.is_same_size, (tensor, other), {})
    values = recorder.origins.value(tensor), recorder.origins.value(other)
    recorder.checks.decided(Expr(operator.eq, (Expr("is_same_size", values), same)))
    return same


def _device(recorder: Recorder, tensor: torch.Tensor) -> torch.device:
    """The device; it is known by identity, so that the graph still runs when the model moves elsewhere."""
    device: torch.device = recorder.run(getattr, (tensor, "device"), {})
    value = recorder.origins.value(tensor)
    recorder.placed = value, device
    recorder.decisions.note("device", device, value)
    recorder.origins.remember(device, Expr(getattr, (value, "device")))
    return device


def _parse_to(recorder: Recorder, tensor: torch.Tensor, *told: Any, **options: Any) -> Any:
    """What `module.to(tensor)` reads of the tensor: its device and its dtype."""
    parse: Any = torch._C._nn._parse_to  # pyright: ignore[reportAttributeAccessIssue]
    _, _, *rest = recorder.run(parse, (tensor, *told), options)
    return _device(recorder, tensor), _dtype(recorder, tensor, moves=True), *rest


def _result_type(recorder: Recorder, tensor: torch.Tensor, other: Any) -> torch.dtype:
    dtype: torch.dtype = recorder.run(torch.result_type, (tensor, other), {})
    if is_users_question():
        known = recorder.origins.value(other) if isinstance(other, torch.Tensor) else plain(other)
        recorder.decisions.note_result(dtype, recorder.origins.value(tensor), known)
    return dtype


def _is_on(name: str) -> Call:
    """The read of whether a tensor is on a kind of device, where the model's code goes by that."""

    def read(recorder: Recorder, tensor: torch.Tensor) -> bool:
        found: bool = recorder.run(getattr, (tensor, name), {})
        frame = user_frame()
        if is_users_question() and frame is not None and not only_says(frame):
            message = f"{source_line()} decides by {name}, {HELD}; move the model before"
            recorder.checks.hold(Expr(getattr, (recorder.origins.value(tensor), name)), found, message)
        return found

    return read


def _dtype(recorder: Recorder, tensor: torch.Tensor, moves: bool = False) -> torch.dtype:
    """The dtype; which tensor it was read from is noted, for calls that are given it."""
    dtype: torch.dtype = recorder.run(getattr, (tensor, "dtype"), {})
    value = recorder.origins.value(tensor)
    recorder.dtypes.note(dtype, value, len(recorder.steps), moves, by_torch=not is_users_question())
    _hold_kind(recorder, tensor, dtype)
    if recorder.decisions.note("dtype", dtype, value):
        recorder.dtypes.settle(value)
    return dtype


def _type(recorder: Recorder, tensor: torch.Tensor, *told: Any, **options: Any) -> Any:
    """`tensor.type(...)` casts; without arguments it gives a name, known by identity where it is given on."""
    if told or options:
        return recorder.function(torch.Tensor.type, (tensor, *told), options)
    found: str = recorder.run(torch.Tensor.type, (tensor,), {})
    value = recorder.origins.value(tensor)
    recorder.decisions.note("type", found, value)
    recorder.origins.remember(found, Expr("type", (value,)))
    return found


def _is_floating_point(recorder: Recorder, tensor: torch.Tensor) -> bool:
    _hold_kind(recorder, tensor, recorder.run(getattr, (tensor, "dtype"), {}))
    return recorder.run(torch.is_floating_point, (tensor,), {})


def _hold_kind(recorder: Recorder, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Add a check that an input whose dtype the model asks for is floating-point if and only if it was.

    A boolean mask, for example, selects, while a floating-point mask is added.
    """
    value = recorder.origins.value(tensor)
    if is_input(value):
        kind = "floating-point" if dtype.is_floating_point else "other than floating-point"
        message = (
            f"{source_line()} asks for the dtype of an input, whose numbers are {kind} in this graph; trace "
            "with example_inputs of the kind that you need"
        )
        recorder.checks.hold(Expr("is_floating_point", (value,)), dtype.is_floating_point, message)


def _item(recorder: Recorder, tensor: torch.Tensor) -> Any:
    """The number in a tensor; the tensor itself where it depends on data and is only compared."""
    value = recorder.origins.value(tensor)
    if is_data(value):
        frame = user_frame()
        if frame is not None and only_judged(frame):
            # Python compares in double precision, which not every device has.
            widened = tensor.is_floating_point() and tensor.device.type != "mps"
            return recorder.function(torch.Tensor.double, (tensor,), {}) if widened else tensor
    return recorder.function(torch.Tensor.item, (tensor,), {})


def _cast(kind: type, name: str) -> Call:
    """The read of a plain number, where `int` or `float` is not known yet to be called on tensors."""

    def read(recorder: Recorder, tensor: torch.Tensor) -> Any:
        frame = user_frame()
        if frame is not None and is_data(recorder.origins.value(tensor)):
            recorder.session.note_cast(kind, frame.f_globals)
        return recorder.function(getattr(torch.Tensor, name), (tensor,), {})

    return read


def _truth(recorder: Recorder, tensor: torch.Tensor) -> bool:
    """The truth of a tensor; if it depends on data, only a check may ask, and the graph checks too."""
    value = recorder.origins.value(tensor)
    truth: bool = recorder.run(torch.Tensor.__bool__, (tensor,), {})
    if not is_data(value):
        recorder.checks.decided(Expr(operator.ne if truth else operator.eq, (value, 0)), check=TRUTH)
        return truth
    frame = user_frame()
    # `torch._assert` goes on with nothing but an error.
    asserted = truth and asker().f_code is torch._assert.__code__
    if not asserted and (frame is None or not only_checks(frame, truth)):
        way = recorder.branches.way(value, frame)
        if way is not None:
            return way
        asked = asks_any(value)
        some = None if asked is None else recorder.branches.selected(asked[0], asked[2])
        if asked is not None and some is not None:
            return asked[1] == some
        kind = (
            "random numbers, in a way that cannot be followed"
            if is_drawn(value)
            else "the numbers in a tensor"
        )
        raise NumberReadError(reads(value, f"branches on {kind}"), truth)
    check(recorder, tensor if truth else recorder.function(torch.logical_not, (tensor,), {}))
    return truth


def _text(name: str) -> Call:
    """The read of a text with the numbers in a tensor, which may decide anything unless it is a message."""

    def read(recorder: Recorder, tensor: torch.Tensor, *told: Any, **options: Any) -> str:
        text: str = recorder.run(getattr(torch.Tensor, name), (tensor, *told), options)
        value, frame = recorder.origins.known(tensor), user_frame()
        if frame is None or recorder.inside or only_says(frame):
            return text
        if is_data(value):
            raise NumberReadError(reads(value, "makes a text of the numbers in a tensor"), text)
        if value is not None:
            recorder.function(torch.Tensor.tolist, (tensor,), {})  # The graph checks what follows from sizes.
        return text

    return read


def _memory(name: str) -> Call:
    """The read of a tensor's storage, which lends its numbers to code that torch functions do not show."""

    def read(recorder: Recorder, tensor: torch.Tensor) -> Any:
        frame, value = user_frame(), recorder.origins.known(tensor)
        if is_data(value) and frame is not None and uses_beyond(frame, name, _OF_MEMORY):
            raise UnrecordableError(reads(value, "looks into the memory of a tensor"))
        return recorder.run(getattr(torch.Tensor, name), (tensor,), {})

    return read


_OF_MEMORY = frozenset({"data_ptr", "device", "_cdata"})
"""What a storage tells that is neither its numbers nor how many there are."""


def check(recorder: Recorder, condition: torch.Tensor) -> None:
    """Add a check that a tensor is true."""
    message = f"the check at {source_line() or 'an unknown line'} failed"
    recorder.steps.append(recorder.step("call_function", TRUTH, (condition, message), {}))


def _data(recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.data`."""
    return recorder.function(data_of, (tensor,), {})


def _overwrite(recorder: Recorder, tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`, which to a graph is that the tensor's memory is overwritten.

    What was saved of the old memory for backward is lost so, which autograd has to see.

    Raises:
        UnrecordableError: the memory is that of another tensor at other sizes, which keeps what it holds.
    """
    recorder.origins.value(value)
    own = recorder.origins.value(tensor)
    if isinstance(own, Step) and own.called in _AT_TIMES_VIEWS:
        raise UnrecordableError(f"sets the `data` of what {own.called} gives, a view at some sizes only")
    if storage_of(tensor) != storage_of(value):
        memory = recorder.function(torch.Tensor.detach, (tensor,), {})
        recorder.function(torch.Tensor.copy_, (memory, value), {})
        recorder.origins.replace_memory(tensor)


_AT_TIMES_VIEWS = frozenset("reshape flatten ravel unflatten contiguous reshape_as".split())
"""What gives a view of a tensor for some sizes, and a copy for others."""


_READS: dict[str, Call] = {
    "shape": _shape,
    "size": _size,
    **dict.fromkeys(("dim", "ndim", "ndimension"), _rank),
    "numel": _numel,
    "nelement": _numel,
    "stride": _stride,
    "storage_offset": _offset,
    "nbytes": _bytes,
    "element_size": _element_size,
    "itemsize": _element_size,
    "is_same_size": _is_same_size,
    "device": _device,
    "dtype": _dtype,
    "type": _type,
    "result_type": _result_type,
    "_parse_to": _parse_to,
    **{name: _is_on(name) for name in ("is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu")},
    "is_floating_point": _is_floating_point,
    "item": _item,
    "__int__": _cast(int, "__int__"),
    "__float__": _cast(float, "__float__"),
    "__bool__": _truth,
    **{name: _memory(name) for name in ("storage", "untyped_storage", "_typed_storage")},
    "__repr__": _text("__repr__"),
    "__format__": _text("__format__"),
    "data": _data,
}
