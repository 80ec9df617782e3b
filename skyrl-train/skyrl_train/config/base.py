"""The base of every config section: frozen, strict, no unknown keys, and able to describe its own fields.

A default is written once, on the field; the docstring under the field is its help text. Both the YAML file that
Hydra reads and the reference page are generated from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic.fields import FieldInfo

T = TypeVar("T")


class Section(BaseModel):
    """One section of the configuration: immutable, and strict about types (only an int passes for a float)."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Allowed:
    """The words for what a field accepts, where its type and bounds do not say it by themselves."""

    text: str


if TYPE_CHECKING:
    Resolved = Annotated[T, "null until load_config fills it in"]
else:
    Resolved = Optional
"""`Resolved[str]`: null may be written and means "take it from another key"; `load_config` has replaced it by then,
so that readers see a `str`. `config/resolve.py` holds the table of those keys."""


def resolved_later() -> Any:
    """The default, null, of a `Resolved[...]` field."""
    return None


def _as_list(value: object) -> object:
    """A single string becomes a list of one."""
    return [value] if isinstance(value, str) else value


def as_tuple(value: object) -> object:
    """YAML has lists only."""
    return tuple(value) if isinstance(value, list) else value


def _null_as_empty(value: object) -> object:
    return [] if value is None else _as_list(value)


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("0 is neither a limit nor -1")
    return value


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(type(name) is str and _is_plain(inner) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(inner) for inner in value)
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _only_plain(value: object) -> object:
    """Nothing else comes back from YAML as it was."""
    if not _is_plain(value):
        raise ValueError("cannot be written to a file")
    return value


Count = Annotated[int, Ge(1)]
OptionalCount = Annotated[int, Ge(1)] | None
CountOrMinusOne = Annotated[int, Ge(-1), AfterValidator(_not_zero), Allowed("-1 or an integer >= 1")]
Text = Annotated[str, MinLen(1)]
StringList = Annotated[list[Text], BeforeValidator(_null_as_empty), Allowed("a string or a list of strings")]
OptionalStringList = Annotated[
    list[Text] | None, BeforeValidator(_as_list), Allowed("a string, a list of strings, or null")
]
TokenIdList = Annotated[list[Annotated[int, Ge(0)]], Allowed("a list of token ids")]
FREE_VALUE = "a finite number, a string, true, false, null, or a list or section of these"
FreeValue = Annotated[Any, AfterValidator(_only_plain), Allowed(FREE_VALUE)]
"""A value under a key that a user chose: anything that the run folder's YAML can hold."""


def as_section(annotation: Any) -> type[Section] | None:
    """The section class behind an annotation, or None where the field is a value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def is_open(field: FieldInfo) -> bool:
    """Whether a field holds keys that users choose: `dict[str, ...]`."""
    return get_origin(field.annotation) is dict


def iter_fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field of a section and of the sections inside it, as (dotted key, field), in writing order."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        yield key, field
        inner = as_section(field.annotation)
        if inner is not None:
            yield from iter_fields(inner, f"{key}.")


def describe_field(field: FieldInfo) -> str:
    """What a field accepts, in words: "an integer >= 1", "one of nccl, gloo", "true or false"."""
    return _describe(field.annotation, list(field.metadata))


def describe_values(field: FieldInfo) -> str:
    """What an open field accepts under each of its keys, in words."""
    return _describe(get_args(field.annotation)[1], [])


def _describe(annotation: Any, metadata: list[Any]) -> str:
    for item in metadata:
        if isinstance(item, Allowed):
            return item.text
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _describe(inner, [*metadata, *more])
    if get_origin(annotation) in (Union, UnionType):
        choices = [_describe(choice, metadata) for choice in get_args(annotation) if choice is not type(None)]
        return ", ".join(choices) + " or null"
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    if as_section(annotation) is not None:
        return "a section"
    text = "a non-empty string" if MinLen(1) in metadata else "a string"
    names = {bool: "true or false", int: "an integer", float: "a number", str: text}
    return names[annotation] + _bounds(metadata)


def _bounds(metadata: list[Any]) -> str:
    words = []
    for item in metadata:
        if isinstance(item, Ge):
            words.append(f">= {item.ge}")
        elif isinstance(item, Gt):
            words.append(f"> {item.gt}")
        elif isinstance(item, Le):
            words.append(f"<= {item.le}")
        elif isinstance(item, Lt):
            words.append(f"< {item.lt}")
    return " " + " and ".join(words) if words else ""


def value_at(tree: object, key: str) -> Any:
    """The value under a dotted key in nested sections or mappings; KeyError where there is none."""
    for name in key.split("."):
        if isinstance(tree, Mapping):
            tree = tree[name]
        elif isinstance(tree, Section) and (name in type(tree).model_fields or name in (tree.model_extra or {})):
            tree = getattr(tree, name)
        else:
            raise KeyError(key)
    return tree


def with_value(section: Section, key: str, value: object) -> Any:
    """A copy of a frozen section with one dotted key replaced."""
    name, _, rest = key.partition(".")
    inner = with_value(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})
