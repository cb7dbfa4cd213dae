"""Operations that change their operands, and their forms that do not."""

import torch

aten = torch.ops.aten


def out_of_place(func: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The form of an operation that makes a new tensor or view; itself if there is none."""
    packet = getattr(aten, func._opname.removesuffix("_"), None) if func.namespace == "aten" else None
    if packet is None or hasattr(packet, func._overloadname):
        return getattr(packet, func._overloadname, func)
    others = (getattr(packet, name) for name in packet.overloads())
    return next((other for other in others if _argument_types(other) == _argument_types(func)), func)


def _argument_types(func: torch._ops.OpOverload) -> list[str]:
    return [str(argument.type) for argument in func._schema.arguments]
