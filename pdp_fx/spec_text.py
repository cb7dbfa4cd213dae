"""Specs as plain values and as text: dataclasses to dicts and back with strict keys, and a small TOML writer.

Plain values are dicts, strings, ints, floats and None, as in JSON. For None, which TOML lacks, it is "skip".
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import Parameter, signature
from typing import TypeAlias, TypeVar, cast

from pdp_fx.errors import SpecError
from pdp_fx.field_checks import described, did_you_mean
from pdp_fx.granularity import NM, Channels, Rule, Unstructured
from pdp_fx.policy_names import policy_path
from pdp_fx.schedule import Schedule

Plain: TypeAlias = "str | int | float | None | dict[str, Plain]"

T = TypeVar("T")

SKIP = "skip"
"""Stands for the rule None where the format has no null."""

_RULES: dict[str, type[Rule]] = {"unstructured": Unstructured, "nm": NM, "channels": Channels}


def fields_to_plain(instance: Rule | Schedule) -> dict[str, Plain]:
    """The fields that are not None, by name, with a policy as its import path.

    Raises:
        SpecError: a policy cannot be imported by its name.
    """
    values = {field.name: getattr(instance, field.name) for field in fields(instance)}
    return {
        name: policy_path(value) if callable(value) else value
        for name, value in values.items()
        if value is not None
    }


def rule_to_plain(rule: Rule | None) -> Plain:
    """A rule as {"unstructured": {"ratio": 0.9}}, and None as None."""
    if rule is None:
        return None
    name = next(name for name, kind in _RULES.items() if type(rule) is kind)
    return {name: fields_to_plain(rule)}


def rule_from_plain(value: object, where: str) -> Rule | None:
    """The inverse of `rule_to_plain`, also taking "skip" for None; `SpecError` naming `where` otherwise."""
    if value is None or value == SKIP:
        return None
    example = 'write {"unstructured": {"ratio": 0.9}}, or "skip" for no pruning'
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} must be a table that names one rule, got {described(value)}; {example}")
    named = table(cast(object, value), where, tuple(_RULES))
    if len(named) != 1:
        raise SpecError(f"{where} must name exactly one rule, got {', '.join(named) or 'none'}; {example}")
    ((name, options),) = named.items()
    return build(_RULES[name], options, f"{where}.{name}")


def build(make: Callable[..., T], value: object, where: str) -> T:
    """`make(**value)` for a table with neither unknown nor missing keys; else `SpecError` naming `where`."""
    parameters = signature(make).parameters
    given = table(value, where, tuple(parameters))
    required = (name for name, parameter in parameters.items() if parameter.default is Parameter.empty)
    missing = [name for name in required if name not in given]
    if missing:
        raise SpecError(f"{where} lacks the key {missing[0]!r}; it accepts {', '.join(parameters)}")
    try:
        return make(**given)
    except SpecError as err:
        raise SpecError(f"in {where}: {err}") from err


def table(value: object, where: str, accepted: tuple[str, ...] | None = None) -> dict[str, object]:
    """`value` as a dict whose keys are all `accepted` (None: any string); else `SpecError` naming `where`."""
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} must be a table of keys and values, got {described(value)}")
    items = cast(Mapping[object, object], value)
    for key in items:
        if not isinstance(key, str):
            raise SpecError(f"{where} must have strings as keys, got {described(key)}")
        if accepted is not None and key not in accepted:
            hint = did_you_mean(key, accepted)
            raise SpecError(f"{where} has the unknown key {key!r}; it accepts {', '.join(accepted)}{hint}")
    return dict(cast(Mapping[str, object], items))


def to_toml(values: Mapping[str, Plain]) -> str:
    """TOML text of a table: its scalars first, then each inner table under a header of its own."""
    scalars = [_entry(key, value) for key, value in values.items() if not isinstance(value, dict)]
    tables = [
        "\n".join([f"\n[{_key(key)}]", *(_entry(inner, item) for inner, item in value.items())])
        for key, value in values.items()
        if isinstance(value, dict)
    ]
    return "\n".join([*scalars, *tables]) + "\n"


def parse_toml(text: str) -> dict[str, object]:
    """The table in a TOML text; `SpecError` with the parser's line and column if the text is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise SpecError(f"the text is not valid TOML: {err}") from err


def parse_json(text: str) -> object:
    """The value in a JSON text; `SpecError` if the text is not JSON or has a key twice."""
    try:
        return cast(object, json.loads(text, object_pairs_hook=_without_duplicates))
    except json.JSONDecodeError as err:
        raise SpecError(f"the text is not valid JSON: {err}") from err


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in unique if keys.count(key) > 1)
        raise SpecError(f"the key {twice!r} is given twice; keep one of the two")
    return unique


def _entry(key: str, value: Plain) -> str:
    return f"{_key(key)} = {_value(value)}"


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _quoted(key)


def _value(value: Plain) -> str:
    if value is None:
        return _quoted(SKIP)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(_entry(key, item) for key, item in value.items()) + " }" if value else "{}"
    return repr(value)


def _quoted(text: str) -> str:
    """A TOML basic string: JSON's escapes are TOML's too, but TOML wants DEL escaped as well."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
