"""The keys of a spec's overrides: which are allowed, which one wins for a module, and which match nothing.

A key is the name of a module (a container's name covers everything inside), "re:<regex>" for the whole name
of a module, or a module type. Names win over regexes, and regexes over types. Among matching names the
longest wins, among regexes and types the first.
"""

import pkgutil
import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias, cast

from torch import nn

from pdp_fx.errors import SpecError
from pdp_fx.field_checks import described, did_you_mean
from pdp_fx.granularity import Rule, checked_rule

Key: TypeAlias = str | type[nn.Module]
Override: TypeAlias = tuple[Key, Rule | None]
Overrides: TypeAlias = (
    Mapping[str, Rule | None]
    | Mapping[type[nn.Module], Rule | None]
    | Mapping[Key, Rule | None]
    | Iterable[Override]
)
"""Overrides as a user may write them: a mapping from keys to rules, or pairs of a key and a rule."""

_REGEX = "re:"
_TYPE = "type:"


def normalised(overrides: object) -> tuple[Override, ...]:
    """The overrides as pairs of a checked key and a checked rule, in order; `SpecError` if one is invalid."""
    checked: dict[Key, Rule | None] = {}
    for key, rule in _pairs(overrides):
        checked_key = _checked_key(key)
        where = f"overrides[{key_text(checked_key)!r}]"
        if checked_key in checked:
            raise SpecError(f"{where} is given twice; keep one of the two")
        checked[checked_key] = checked_rule(where, rule)
    return tuple(checked.items())


def winner(overrides: Iterable[Override], name: str, module_type: type[nn.Module]) -> Override | None:
    """The override that holds for the module of this name and type, or None if no key matches it."""
    matching = [override for override in overrides if _matches(override[0], name, module_type)]
    names = [override for override in matching if _is_name(override[0])]
    if names:
        return max(names, key=lambda override: len(str(override[0])))
    regexes = (override for override in matching if isinstance(override[0], str))
    return next(regexes, matching[0] if matching else None)


def check_all_match(keys: Iterable[Key], modules: Mapping[str, nn.Module]) -> None:
    """Raise a `SpecError` if a key matches none of `modules`, given by name; it names close matches.

    A regex or a type that only matches modules which hold layers, and no parameters themselves, matches none.
    """
    lines: list[str] = []
    for key in keys:
        matching = [name for name, module in modules.items() if _matches(key, name, type(module))]
        if not matching:
            lines.append(f"  {key_text(key)!r}{_hint(key, modules)}")
        elif not _is_name(key) and all(_is_container(modules[name]) for name in matching):
            lines.append(f"  {key_text(key)!r}{_hint_inside(key, matching[0])}")
    if not lines:
        return
    raise SpecError(
        "overrides: no module of the model matches\n"
        + "\n".join(lines)
        + "\nCorrect or remove these keys; a key that matches nothing would silently change nothing."
    )


def key_text(key: Key) -> str:
    """The key as it is written in a file: names and regexes as they are, a type as "type:torch.nn.Linear"."""
    if isinstance(key, str):
        return key
    public = getattr(nn, key.__name__, None) is key
    return f"{_TYPE}torch.nn.{key.__name__}" if public else f"{_TYPE}{key.__module__}.{key.__qualname__}"


def storable_key(key: Key) -> str:
    """`key_text`, after a check that a reader gets the same key back from it.

    Raises:
        SpecError: the key is a class that cannot be imported by its name, such as one defined in a function.
    """
    text = key_text(key)
    refusal = f"overrides: {text!r} cannot be written to a file"
    try:
        found = _checked_key(text)
    except SpecError as err:
        raise SpecError(
            f"{refusal}, because the class cannot be imported by that name; define it at the top level "
            "of a module, or use the names of its modules as keys"
        ) from err
    if found is not key:
        raise SpecError(f"{refusal}, because that name is another class")
    return text


def _pairs(overrides: object) -> list[tuple[object, object]]:
    """The keys and values of a mapping or of an iterable of pairs."""
    if isinstance(overrides, Mapping):
        return list(cast(Mapping[object, object], overrides).items())
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        raise SpecError(f"overrides must map keys to rules, got {described(overrides)}; write {{'fc': None}}")
    return [_pair(item) for item in cast(Iterable[object], overrides)]


def _pair(item: object) -> tuple[object, object]:
    if isinstance(item, tuple):
        parts = cast(tuple[object, ...], item)
        if len(parts) == 2:
            return parts
    raise SpecError(f"overrides must be pairs of a key and a rule, got {item!r} among them")


def _checked_key(key: object) -> Key:
    """`key` with a "type:" string resolved to its class; `SpecError` if it is invalid."""
    if isinstance(key, str):
        return _checked_text(key)
    if isinstance(key, type) and issubclass(key, nn.Module):
        return key
    raise SpecError(
        "overrides: a key must be a module name, 're:<regex>' or a subclass of torch.nn.Module, "
        f"got {described(cast(object, key))}"
    )


def _checked_text(key: str) -> Key:
    if key.startswith(_TYPE):
        return _resolved_type(key.removeprefix(_TYPE))
    if key.startswith(_REGEX):
        _check_regex(key.removeprefix(_REGEX))
    elif not key:
        raise SpecError("overrides: the empty name stands for the whole model; give the rule as the default")
    return key


def _check_regex(regex: str) -> None:
    try:
        re.compile(regex)
    except (re.error, OverflowError) as err:
        raise SpecError(f"overrides: {_REGEX + regex!r} is not a regular expression: {err}") from err


def _resolved_type(path: str) -> type[nn.Module]:
    """The module class with this import path, such as torch.nn.Linear."""
    what = f"overrides: the class in {_TYPE + path!r}"
    try:
        found: object = pkgutil.resolve_name(path)
    except (ValueError, ImportError, AttributeError) as err:
        raise SpecError(f"{what} cannot be imported ({err}){_torch_class_like(path)}") from err
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    raise SpecError(f"{what} is no subclass of torch.nn.Module; write for example 'type:torch.nn.Linear'")


def _torch_class_like(path: str) -> str:
    """A hint with the class of torch.nn that has the same name, or else the most similar name."""
    classes = {f"{_TYPE}torch.nn.{name}" for name in dir(nn) if isinstance(getattr(nn, name), type)}
    namesake = f"{_TYPE}torch.nn.{path.rpartition('.')[2]}"
    return (
        f"; did you mean {namesake!r}?"
        if namesake in classes
        else did_you_mean(_TYPE + path, sorted(classes))
    )


def _is_name(key: Key) -> bool:
    return isinstance(key, str) and not key.startswith(_REGEX)


def _matches(key: Key, name: str, module_type: type[nn.Module]) -> bool:
    if not isinstance(key, str):
        return issubclass(module_type, key)
    if key.startswith(_REGEX):
        return re.fullmatch(key.removeprefix(_REGEX), name) is not None
    return name == key or name.startswith(key + ".")


def _is_container(module: nn.Module) -> bool:
    """Whether a module has layers inside, and no parameters of its own."""
    return not module._parameters and any(True for _ in module.parameters())


def _hint_inside(key: Key, container: str) -> str:
    """What the writer of a key may have meant that only matches modules such as this one."""
    if not container:
        return "; that is the whole model: give the rule as the default"
    what = f"; {container!r} holds layers and no weights of its own"
    if isinstance(key, str):
        inside = f"{_REGEX}(?:{key.removeprefix(_REGEX)})\\..*"
        return f"{what}: write {inside!r} for what is inside"
    return f"{what}: write {container!r}, a name, for what is inside"


def _hint(key: Key, modules: Mapping[str, nn.Module]) -> str:
    """What the writer of an unmatched key may have meant."""
    if not isinstance(key, str):
        types = {key_text(type(module)) for module in modules.values()}
        return did_you_mean(key_text(key), sorted(types), most=3)
    if key.startswith(_REGEX):
        regex = key.removeprefix(_REGEX)
        partial = [name for name in modules if name and re.search(regex, name)]
        if partial:
            wider = f"{_REGEX}.*(?:{regex}).*"
            return f"; the regex must match the whole name: write {wider!r} to match {partial[0]!r}"
        return did_you_mean(regex, modules, most=3)
    if any(sign in key for sign in "*?[(|+^$\\"):
        return f"; that is no module name: start a pattern with {_REGEX!r}, as in 're:layer4\\..*'"
    return did_you_mean(key, modules, most=3)
