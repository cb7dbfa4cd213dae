"""Watching the aten operations of a run.

Torch functions are what a recording is made of, but some code never calls one: TorchScript functions, C++
extensions, constructors like `torch.Tensor(3)`. Their aten operations are seen here, so that a tensor made by
them is not taken for a constant. The same look tells whether a call drew random numbers or gave a result
whose size depends on numbers.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from pdp_fx.errors import TraceError
from pdp_fx.tracing.generators import other_generators, torch_generators
from pdp_fx.tracing.steps import UnrecordableError
from pdp_fx.tracing.structure import flat_tensors, memory_of

# Custom operators carry no tags; these are known to give sizes that follow from the sizes of their arguments.
_REGULAR_CUSTOM = frozenset(
    "roi_align roi_pool ps_roi_align ps_roi_pool deform_conv2d _roi_align_backward "
    "grouped_mm_fallback grouped_mm_fallback_backward".split()
)

_ALIASING = frozenset((torch.ops.aten.alias.default, torch.ops.aten.detach.default))
"""Operations that give another object of a tensor, with its gradient or without."""

_UPDATING = frozenset("native_batch_norm cudnn_batch_norm miopen_batch_norm".split())
"""Operations that, told to train, write to their running statistics without saying so."""


class Watch(TorchDispatchMode):
    """Notes which storages come from this run, and what the current call does.

    Args:
        model: the model; a tensor of unknown origin that shares memory with its tensors is no constant.

    Attributes:
        random: whether the current call changed the state of a generator.
        ragged: whether it gave a size that depends on numbers.
        read_numbers: whether it read a number out of a tensor.
        read_weights: whether it used a parameter of the model.
        updates: whether it wrote to running statistics.
        touched: the storages of all tensors that its operations were given.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.random = False
        self.ragged = False
        self.read_numbers = False
        self.read_weights = False
        self.updates = False
        self.touched: set[int] = set()
        self._ragged = WeakTensorKeyDictionary()
        self._watched = False
        self._empty = WeakTensorKeyDictionary()
        self._aliases: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        self._generators = other_generators()
        self._weights = {storage_of(parameter) for parameter in model.parameters()}
        # While a weak reference to a storage exists, its address is not reused for another one.
        self._ours: dict[int, StorageWeakRef] = {}
        self._named = [*model.named_parameters(), *model.named_buffers()]
        for _, tensor in self._named:
            self.own(tensor)

    def own(self, tensor: torch.Tensor) -> None:
        """Note that the storage of a tensor belongs to this run."""
        storage = storage_of(tensor)
        if storage not in self._ours:
            self._ours[storage] = StorageWeakRef(memory_of(tensor))

    def owned(self) -> frozenset[int]:
        """The storages of the model and of all that this run has made so far."""
        return frozenset(self._ours)

    def used(self) -> frozenset[str]:
        """The parameters and buffers of the model that the current call used, by name."""
        return frozenset(name for name, tensor in self._named if storage_of(tensor) in self.touched)

    def is_ours(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor belongs to the model or was allocated in this run."""
        return storage_of(tensor) in self._ours

    def sources(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, bool]]:
        """The tensors that this may be another object of, though no torch function has made it one.

        That is what ``torch.autograd.Variable(x)`` and ``torch.Tensor(x)`` give; with each, whether without
        its gradient.
        """
        for func, source in self._aliases.get(storage_of(tensor), []):
            detached = func is torch.ops.aten.detach.default
            grows = source.requires_grad and not detached
            if source is not tensor and tensor.requires_grad == grows and lies_as(tensor, source):
                yield source, detached

    def is_empty(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made without numbers whatever the model is given, as by ``torch.Tensor()``."""
        return tensor in self._empty

    def makes_ragged(self, tensor: torch.Tensor) -> bool:
        """Whether the size of a tensor may follow from one that depends on numbers.

        A tensor that such a tensor is written into keeps its own size.
        """
        return tensor in self._ragged

    def has_drawn_outside(self) -> bool:
        """Whether traced code drew random numbers from Python's or numpy's generator."""
        return other_generators() != self._generators

    def allow_drawn(self) -> None:
        """Forget random numbers drawn so far: code that is kept whole drew them and will draw them again."""
        self._generators = other_generators()

    @contextmanager
    def watching(self) -> Generator["Watch", None, None]:
        """Watch one call; afterwards the attributes describe it."""
        self.random = self.ragged = self.read_numbers = self.read_weights = self.updates = False
        self.touched = set()
        states, outer = torch_generators(), self._watched
        self._watched = True
        try:
            yield self
        finally:
            self._watched = outer
        self.random = self.random or _have_moved(states)

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise TraceError(
                f"the model calls {func}, which is given functions and runs them where no recording sees; "
                "prepare it with a branch, a loop or an attention of tensor operations instead"
            )
        with torch._C.DisableTorchFunction():
            return self._note(func, args, kwargs or {})

    def _note(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result: Any = func(*args, **kwargs)
        self._follow_ragged(func, args, kwargs, result)
        # As those do that read one number, or compare all.
        self.read_numbers = self.read_numbers or isinstance(result, bool | int | float | complex)
        self.updates = self.updates or _updates(func, args)
        if torch.Tag.nondeterministic_seeded in func.tags and _on_accelerator(result):
            self.random = True
        mine = {storage_of(tensor) for tensor in flat_tensors((args, kwargs))}
        if func in _ALIASING and not self._watched:
            self._aliases.setdefault(storage_of(args[0]), []).append((func, args[0]))
        if func is torch.ops.aten.empty.memory_format and tuple(args[0]) == (0,):
            self._empty[result] = True
        self.touched |= mine
        self.read_weights = self.read_weights or not mine.isdisjoint(self._weights)
        for tensor in flat_tensors(result):
            if storage_of(tensor) not in mine:
                self.own(tensor)
        return result

    def _follow_ragged(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        here = _is_ragged(func, args)
        self.ragged = self.ragged or here
        if not self.ragged:
            return
        read = list(flat_tensors((args, kwargs)))
        if here or any(tensor in self._ragged for tensor in read):
            for tensor in flat_tensors(result):
                if all(tensor is not other for other in read):
                    self._ragged[tensor] = True


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 for an inference tensor, which has no counter."""
    return 0 if tensor.is_inference() else tensor._version


def lies_as(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that share memory are made of the same numbers in it."""
    one, another = (
        (each.dtype, each.shape, each.stride(), each.storage_offset()) for each in (tensor, other)
    )
    return one == another


def _have_moved(states: tuple[torch.Tensor, ...]) -> bool:
    """Whether torch's generators have drawn since; asked without anybody listening."""
    with torch._C.DisableTorchFunction(), no_dispatch():
        return not all(map(torch.equal, states, torch_generators()))


def _updates(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    return func._opname in _UPDATING and args[3] is not None and bool(args[5])


def _is_ragged(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    if func.namespace not in ("aten", "prims"):
        return func._opname not in _REGULAR_CUSTOM
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func._opname == "index":
        return any(index.dtype in (torch.bool, torch.uint8) for index in args[1] if index is not None)
    return True


def _on_accelerator(result: Any) -> bool:
    return any(tensor.device.type != "cpu" for tensor in flat_tensors(result))


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of the memory of a tensor, or of the values of a sparse one."""
    try:
        return memory_of(tensor)._cdata
    except NotImplementedError as err:
        raise UnrecordableError("uses a tensor without memory of its own, as torch.vmap makes them") from err
