"""Reading TOML that people write: strict types, and for every unknown name the nearest known one.

Shared by topologies and scenarios. A table is described by a dataclass; what a file may hold is exactly its fields.
Faults are ``ConfigError`` with the file, the full key and the way out; never a traceback.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from testbed.errors import ConfigError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` or an empty text: the tail of a sentence about an unknown name."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: it cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML ({error}).") from error


def fill(kind: type[T], tables: Mapping[str, Any], where: str) -> T:
    """An instance of the dataclass ``kind`` from ``tables``; ``where`` opens every complaint.

    Raises:
        ConfigError: an unknown or missing key, a value of the wrong type, or one that the dataclass refuses.
    """
    _check_keys(kind, tables, where, "")
    try:
        return msgspec.convert(dict(tables), kind)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from None
        raise ConfigError(f"{where}: {_plain(kind, tables, str(error))}.") from None


def leaf_type(kind: type[Any], key: str, where: str) -> Any:
    """Type of a dotted key of a dataclass.

    Raises:
        ConfigError: there is no such key, or it names a whole table.
    """
    at: Any = kind
    walked = ""
    for part in key.split("."):
        if not dataclasses.is_dataclass(at):
            raise ConfigError(f"{where}: {walked.rstrip('.')} is a value, so there is no key {key!r}.")
        hints = typing.get_type_hints(at)
        if part not in hints:
            raise ConfigError(f"{where}: unknown key {walked + part!r}{_nearest_key(walked, part, hints)}.")
        at = hints[part]
        walked += part + "."
    if dataclasses.is_dataclass(at):
        names = ", ".join(f"{walked}{field.name}" for field in dataclasses.fields(at))
        raise ConfigError(f"{where}: {key!r} is a table; set one of {names}.")
    return at


def parse_value(text: str, kind: Any, where: str, key: str) -> Any:
    """The value of a key given as text on a command line, typed by the schema; lists are separated by commas.

    Raises:
        ConfigError: text that is no value of that type.
    """
    raw: Any = [part.strip() for part in text.split(",") if part.strip()] if typing.get_origin(kind) is tuple else text
    try:
        return msgspec.convert(raw, kind, strict=False)
    except msgspec.ValidationError:
        raise ConfigError(f"{where}: {key} is {text!r}, but it must be {_type_name(kind)}.") from None


def _nearest_key(walked: str, part: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(part, list(known), n=1, cutoff=0.5)
    return f" (did you mean {walked + close[0]!r}?)" if close else f"; known here: {', '.join(known)}"


def _check_keys(kind: Any, value: Any, where: str, walked: str) -> None:
    """Unknown and missing keys anywhere inside; types are msgspec's business."""
    for member in typing.get_args(kind) or (kind,):
        if dataclasses.is_dataclass(member) and isinstance(value, Mapping):
            hints = typing.get_type_hints(member)
            for key, inner in value.items():
                if key not in hints:
                    raise ConfigError(f"{where}: unknown key {walked + key!r}{_nearest_key(walked, key, hints)}.")
                _check_keys(hints[key], inner, where, f"{walked}{key}.")
            for f in dataclasses.fields(member):
                if f.name not in value and f.default is f.default_factory is dataclasses.MISSING:
                    raise ConfigError(f"{where}: {walked}{f.name} is missing; {_way_to_give(f.name, hints[f.name])}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}: {walked.rstrip('.')} is {value}, but it must be a finite number.")
        elif dataclasses.is_dataclass(member) and isinstance(value, list):
            for i, inner in enumerate(value):
                _check_keys(member, inner, where, f"{walked.rstrip('.')}[{i}].")


def _plain(kind: type[Any], tables: Mapping[str, Any], message: str) -> str:
    """msgspec's complaint (expected, got, path) as the end of a sentence that starts with the key and its value."""
    text, _, path = message.replace("`", "").partition(" - at $.")
    at: Any = kind
    value: Any = tables
    for part in re.findall(r"[^.\[\]]+", path):
        if part.isdecimal() and isinstance(value, list):
            at, value = typing.get_args(at)[0], value[int(part)]
        elif (member := _table_in(at)) and isinstance(value, Mapping) and part in value:
            at, value = typing.get_type_hints(member)[part], value[part]
        else:  # inside something that is no table of ours
            return f"{path}: {text[:1].lower()}{text[1:]}"
    return f"{path} is {value!r:.60}, but it must be {_form(at)}"


def _table_in(kind: Any) -> Any:
    """The dataclass that a type is or may be."""
    return next((member for member in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(member)), None)


def _way_to_give(key: str, kind: Any) -> str:
    """How a missing key is written: a table, one of several tables, or a value."""
    if table := _table_in(kind):
        return f"write [[{key}]] at least once" if table is not kind else f"write its table [{key}]"
    return f"give it {_form(kind)}"


def _form(kind: Any) -> str:
    """What a value of a file must be, in words."""
    if typing.get_origin(kind) is tuple:
        forms = list(dict.fromkeys(_form(a) for a in typing.get_args(kind) if a is not Ellipsis))
        return f"a list, each {' or '.join(forms)}"
    return _type_name(kind)


def _type_name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    if kind in names:
        return names[kind]
    if dataclasses.is_dataclass(kind) or typing.get_origin(kind) is Mapping:
        return "a table"
    arguments = [a for a in typing.get_args(kind) if a is not types.NoneType and a is not Ellipsis]
    if typing.get_origin(kind) is tuple:
        return f"a list, separated by commas, each {_type_name(arguments[0])}"
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(str(a) for a in arguments)
    return " or ".join(_type_name(a) for a in arguments)
