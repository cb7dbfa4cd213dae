"""How a call of a torch function is written in a graph, and which calls only look at a tensor.

`fx` graphs read best with operators as `operator.add`, methods as `call_method` and everything else as
`call_function`; `__torch_function__` reports all of them as functions.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import fx
from torch.fx import has_side_effect
from torch.fx.node import map_arg

from pdp_fx.tracing.modes import When, function_of
from pdp_fx.tracing.structure import mapped

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Form = tuple[str, str | Callable[..., Any], tuple[Any, ...]]

_BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift eq ne lt le gt ge".split()
_UNARY = "neg pos abs invert".split()

# Method names, by the operator that they stand for and by how many arguments they then have.
_OPERATORS: dict[str, tuple[Callable[..., Any], int]] = {
    **{f"__{name.strip('_')}__": (getattr(operator, name), 2) for name in _BINARY},
    **{f"__{name}__": (getattr(operator, name), 1) for name in _UNARY},
    **{name: (getattr(operator, name), 2) for name in "add sub mul matmul eq ne lt le gt ge".split()},
    "div": (operator.truediv, 2),
    "neg": (operator.neg, 1),
    "__getitem__": (operator.getitem, 2),
    "__setitem__": (operator.setitem, 3),
}
_REFLECTED = {f"__r{name.strip('_')}__": getattr(operator, name) for name in _BINARY[:13]}
_REFLECTED["__rdiv__"] = operator.truediv

_IN_PLACE = frozenset(
    name
    for name in dir(torch.Tensor)
    if (name.endswith("_") and not name.endswith("__"))
    or (name.startswith("__i") and f"__{name[3:]}" in _OPERATORS and name != "__invert__")
)

_NAMES_OF_NUMPY = {
    "axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other",
}  # fmt: skip
"""What functions that are not written in Python take NumPy's names of arguments for."""

NUMBER_HOMES = frozenset({"_operator", "builtins", "math"})
"""The Python modules whose functions compute numbers from sizes."""

# A look at these never depends on the numbers inside the tensor.
METADATA = frozenset(
    "dim ndimension ndim stride is_contiguous is_floating_point is_complex is_signed is_tensor is_storage "
    "element_size get_device is_pinned is_inference is_same_size is_set_to is_shared is_conj is_neg "
    "has_names type storage_offset can_cast promote_types result_type broadcast_shapes typename "
    "is_coalesced dense_dim sparse_dim _is_view __hash__ __repr__ __str__ __format__ __dir__ data_ptr "
    "untyped_storage storage numel nelement size __len__ retain_grad is_distributed _is_zerotensor "
    "dtype device layout requires_grad is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_sparse_csr "
    "is_quantized is_mkldnn is_mps is_xpu is_xla is_mtia is_maia is_ipu is_vulkan is_ort is_hpu is_nested "
    "itemsize nbytes names output_nr name _version retains_grad".split()
)
OF_GRADIENTS = frozenset("requires_grad is_leaf grad_fn is_inference".split())
"""Of these, those that depend on whether gradients are on, or inference mode."""

# These need the sizes, which in a ragged tensor depend on numbers; the first can be computed with.
LIVE_SIZES = frozenset("shape size numel nelement".split())
SIZES = LIVE_SIZES | frozenset("__len__ stride is_contiguous is_same_size nbytes".split())
_SIZED_BY_FIRST = frozenset(
    "scatter scatter_add scatter_reduce index_copy index_add index_fill index_put select_scatter "
    "slice_scatter diagonal_scatter to type_as".split()
)
_SIZED_BY_TWO = frozenset("masked_fill masked_scatter".split())
_SIZED_BY_REST = frozenset("new_zeros new_ones new_full new_empty".split())
_BROADCASTS = frozenset(
    "add sub mul div truediv floordiv mod pow maximum minimum where eq ne lt le gt ge and or xor "
    "radd rsub rmul rdiv rtruediv logical_and logical_or logical_xor "
    "bitwise_and bitwise_or bitwise_xor".split()
)


def register_in_place_functions() -> None:
    """Tell `fx` that in-place methods, called as functions, have side effects.

    As a method call, an in-place operation whose result nobody uses would count as dead code.
    """
    for name in sorted(_IN_PLACE):
        has_side_effect(getattr(torch.Tensor, name))


register_in_place_functions()


def _misnamed() -> dict[Any, str]:
    """Operators of tensors whose functions carry the name of another method, such as `pow` for `__pow__`."""
    found: dict[Any, str] = {}
    for name in dir(torch.Tensor):
        function = getattr(torch.Tensor, name)
        own = getattr(function, "__name__", name)
        written = name in _OPERATORS or name in _REFLECTED or name in _IN_PLACE
        if written and getattr(torch.Tensor, own, None) is not function:
            found[function] = name
    return found


_MISNAMED = _misnamed()


def only_looks(name: str, arguments: int) -> bool:
    """Whether a function with this name and number of arguments tells nothing of a tensor's numbers."""
    return name in METADATA and not (name == "type" and arguments > 1)


def who_hooks_too() -> str:
    """Who else may have hooked what happens in a module, as the end of a sentence; nothing if nobody has."""
    module = torch.nn.modules.module
    if not (module._global_forward_pre_hooks or module._global_forward_hooks):
        return ""
    return ", or a hook of all modules does, as `FlopCounterMode` sets; call this outside of it"


def name_of(function: Callable[..., Any]) -> str:
    """The name of a torch function; for the getter of a tensor's property, the property's name.

    That of an operator that is not torch's own tells where it is from, for it may be called as a function of
    torch is.
    """
    if is_custom(function):
        return str(function)
    name = _MISNAMED.get(function) or getattr(function, "__name__", type(function).__name__)
    if name not in ("__get__", "__set__"):
        return name
    owner: Any = getattr(function, "__self__", None)
    return getattr(owner.fget if isinstance(owner, property) else owner, "__name__", name)


def is_custom(function: object) -> bool:
    """Whether this is an operator that is not torch's own, as `torch.library` defines them."""
    if not isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return False
    return function.__module__ not in ("torch._ops.aten", "torch._ops.prims")


def is_getter(function: Callable[..., Any]) -> bool:
    """Whether the function reads a property of a tensor."""
    return getattr(function, "__name__", "") == "__get__"


def is_setter(function: Callable[..., Any]) -> bool:
    """Whether the function sets a property of a tensor."""
    return getattr(function, "__name__", "") == "__set__"


def is_in_place(name: str) -> bool:
    """Whether a method of this name changes its tensor, or a function of several tensors these."""
    return name in _IN_PLACE or name == "__setitem__" or changes_each(name)


def changes_each(name: str) -> bool:
    """Whether a function of this name changes each of several tensors, as ``torch._foreach_mul_`` does."""
    return name.startswith("_foreach_") and name.endswith("_")


def keeps_size(name: str) -> bool:
    """Whether a method of this name changes its tensor, but not the size of it."""
    return is_in_place(name) and not name.startswith(("resize", "set_"))


def sizing(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The operands that alone decide the size of the result of a method of this name; None if all may."""
    if name in _SIZED_BY_REST:
        return args[1:] or None
    count = 1 if name in _SIZED_BY_FIRST else 2 if name in _SIZED_BY_TWO else len(args) + 1
    return args[:count] if len(args) >= count else None


def broadcasts(name: str) -> bool:
    """Whether the result of a function of this name has the size to which its operands are broadcast."""
    return name.strip("_") in _BROADCASTS


def acts_in_place(node: fx.Node) -> bool:
    """Whether a node calls a function or method that changes a tensor."""
    if node.op not in ("call_method", "call_function"):
        return False
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace") is True:
        return True
    target = function_of(node)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return is_in_place(f"__{name}__") or (name.endswith("_") and not name.endswith("__"))


def changes_numbers(node: fx.Node) -> bool:
    """Whether a node acts in place on the numbers in a tensor."""
    return acts_in_place(node) and not only_marks(node)


def only_marks(node: fx.Node) -> bool:
    """Whether a node acts in place, but on no numbers: it says whether a tensor needs a gradient."""
    return function_of(node) in ("requires_grad_", torch.Tensor.requires_grad_)


def written_by(node: fx.Node) -> list[fx.Node]:
    """What a node that acts in place changes."""
    place = int(isinstance(node.target, When))
    found: list[fx.Node] = []
    given = [*node.args[place:], *node.kwargs.values()]
    map_arg(node.kwargs.get("out") or given[:1], found.append)
    return found


def in_own_names(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments under the names that torch itself has for them, and without an ``out`` of None."""
    if not kwargs or not isinstance(function, BuiltinFunctionType | MethodDescriptorType):
        return dict(kwargs)
    taken = _arguments_of(name_of(function))
    names = {name: name if name in taken else _NAMES_OF_NUMPY.get(name, name) for name in kwargs}
    return {names[name]: value for name, value in kwargs.items() if name != "out" or value is not None}


def first_by_position(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments with the first given by position, as in `torch.roll(x, 1)`, if it is given by keyword."""
    first = None if args else _first_name(function)
    if first is None or first not in kwargs:
        return args, kwargs
    return (kwargs[first],), {name: value for name, value in kwargs.items() if name != first}


@functools.cache
def _first_name(function: Callable[..., Any]) -> str | None:
    """The name of the first argument of a function of torch; None if it is not known."""
    firsts = [names[0] for names in _argument_names(function) if names]
    if isinstance(function, FunctionType):
        return firsts[0] if firsts else None
    return "input" if "self" in firsts else None


def _argument_names(function: Callable[..., Any]) -> list[list[str]]:
    """The names of the positional arguments of a function of torch, for each of its forms."""
    code = getattr(inspect.unwrap(function), "__code__", None) if isinstance(function, FunctionType) else None
    if code is not None:
        return [list(code.co_varnames[: code.co_argcount])]
    return [[argument.name for argument in form.arguments] for form in _forms(name_of(function))]


def without_hints(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments without one that says what others say, such as a size that follows from them."""
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
    if name != "repeat_interleave" or isinstance(repeats, torch.Tensor):
        return dict(kwargs)
    return {key: value for key, value in kwargs.items() if key != "output_size"}


@functools.cache
def _arguments_of(name: str) -> frozenset[str]:
    """The names of the arguments of an aten operation, in all its forms."""
    return frozenset(argument.name for form in _forms(name) for argument in form.arguments)


def _forms(name: str) -> list[torch.FunctionSchema]:
    """The schemas of an aten operation; none if there is no operation of this name."""
    packet = getattr(torch.ops.aten, name, None)
    known = isinstance(packet, torch._ops.OpOverloadPacket)
    return [getattr(packet, form)._schema for form in packet.overloads()] if known else []


def fails_by_numbers(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> bool:
    """Whether a call of a torch function that fails does so by the numbers in tensors, not by their sizes."""

    def without_numbers(leaf: Any) -> Any:
        return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf

    try:
        function(*mapped(without_numbers, args), **mapped(without_numbers, kwargs))
    except Exception:  # noqa: BLE001 it fails there, too, or is not known there
        return False
    return True


def in_graph_form(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Form:
    """The `fx` op, target and positional arguments that write this call."""
    name = name_of(function)
    if is_getter(function):
        return "call_function", getattr, (args[0], name)
    if getattr(torch.Tensor, name, None) is not function:
        return "call_function", function, args
    if name in _REFLECTED and not kwargs:
        return "call_function", _REFLECTED[name], (args[1], args[0])
    target, count = _OPERATORS.get(name, (None, 0))
    if target is not None and len(args) == count and not kwargs:
        return "call_function", target, args
    return "call_method", name, args


def kept_alive(target: str | Callable[..., Any]) -> Callable[..., Any] | None:
    """An in-place or random method as a function that dead code elimination leaves alone, or None."""
    return getattr(torch.Tensor, target) if isinstance(target, str) and target in _IN_PLACE else None


def told_to_channels(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> list[Any]:
    """The arguments of a call of a torch function that say which axes it runs along or what it fills with."""
    telling = _AXES | ({"value"} if name_of(function).rstrip("_") in _FILLS else set[str]())
    found = [value for name, value in kwargs.items() if name in telling]
    # Several axes may be given one by one.
    told = (
        zip([*names, *names[-1:] * len(args)], args, strict=False)
        for names in _argument_names(function)
        if names
    )
    return [*found, *(value for pairs in told for name, value in pairs if name in telling)]


_AXES = frozenset("dim dims axis axes dim0 dim1 axis0 axis1 start_dim end_dim source destination".split())
_FILLS = frozenset("pad constant_pad_nd fill index_fill scatter".split())
