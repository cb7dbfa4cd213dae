"""How specs check mask policies, print them by class name, and write them to files as import paths."""

import functools
import pkgutil
from collections.abc import Callable
from typing import Any, cast

from pdp_fx.errors import SpecError
from pdp_fx.field_checks import described


def resolved(where: str, policy: object) -> Callable[[Any], Any] | None:
    """``policy`` with an import path such as "package.module.Mine" resolved; None stays None.

    Raises:
        SpecError: it cannot be called or imported; the message says ``where`` it stood.
    """
    found: object = policy
    if isinstance(policy, str):
        try:
            found = pkgutil.resolve_name(policy)
        except (ValueError, ImportError, AttributeError) as err:
            raise SpecError(f"{where}: {policy!r} cannot be imported: {err}") from err
    if found is None or callable(found):
        return found
    raise SpecError(
        f"{where} must be a subclass of WeightPolicy, NMPolicy or ChannelPolicy, got {described(found)}"
    )


def policy_text(policy: Callable[[Any], Any]) -> str:
    """The policy as people read it: the name of its class, with the options of a partial.

    Example:
        >>> policy_text(functools.partial(dict, theta=0.5))
        'dict(theta=0.5)'
    """
    if isinstance(policy, functools.partial):
        options = [*map(repr, policy.args), *(f"{key}={value!r}" for key, value in policy.keywords.items())]
        return f"{policy_text(cast(Callable[[Any], Any], policy.func))}({', '.join(options)})"
    return str(getattr(policy, "__name__", type(policy).__name__))


def policy_path(policy: Callable[[Any], Any]) -> str:
    """The import path of a policy, from which `resolved` gets the same object.

    Raises:
        SpecError: there is none, as for a partial or a class that is defined in a function.
    """
    path = f"{getattr(policy, '__module__', '')}.{getattr(policy, '__qualname__', '')}"
    try:
        found = pkgutil.resolve_name(path)
    except (ValueError, ImportError, AttributeError):
        found = None
    if found is policy:
        return path
    raise SpecError(
        f"the policy {policy_text(policy)} cannot be written to a file, because it cannot be imported as "
        f"{path!r}; define a class at the top level of a module"
    )
