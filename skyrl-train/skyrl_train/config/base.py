"""Base class for all config sections (frozen, strict, no unknown keys), and helpers that describe their fields.

A default is written once, on the field. The docstring below the field is its help text, even for subclasses that change
only the default. A section uses its class's docstring. `dev/configuration.py` turns defaults and help texts into the
YAML files that Hydra reads and the reference page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import getdoc
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic.fields import FieldInfo

T = TypeVar("T")

_MISSING = object()


class Section(BaseModel):
    """A section of the configuration. Immutable and strict about types, except that a float field accepts an int."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Put each help text on one line.

        A section without one uses the docstring of its class, possibly an inherited one. A value inherits the help text
        of the field that it overrides.
        """
        sections = [base for base in cls.__mro__ if issubclass(base, Section)]
        for name, field in cls.model_fields.items():
            fields = [base.model_fields[name] for base in sections if name in base.model_fields]
            inner = as_section(field.annotation)
            texts = [
                field.description,
                None if inner is None else getdoc(inner),
                *(base.description for base in fields),
            ]
            field.description = " ".join(next(filter(None, texts), "").split())


@dataclass(frozen=True)
class Allowed:
    """Description of the values that a field accepts. Overrides the one derived from its type and bounds."""

    text: str


if TYPE_CHECKING:
    Resolved = Annotated[T, "null until load_config fills it in"]
else:
    Resolved = Optional
"""Type of a field whose default comes from another key. The default is null until `load_config` fills it in, so code
that reads a `Resolved[str]` sees a `str`. `loading.SOURCES` lists where each default comes from."""


def resolved_later() -> Any:
    """Return the placeholder default (null) of a `Resolved[...]` field."""
    return None


def as_list(value: object) -> object:
    """Return a string as a list of one."""
    return [value] if isinstance(value, str) else value


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(type(name) is str and _is_plain(inner) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(inner) for inner in value)
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _check_plain(value: object) -> object:
    """Raise ValueError for a value that does not survive a round trip through YAML."""
    if not _is_plain(value):
        raise ValueError("cannot be written to a file")
    return value


Count = Annotated[int, Ge(1)]
OptionalCount = Annotated[int, Ge(1)] | None
CountOrMinusOne = Annotated[Literal[-1] | Count, Allowed("-1 or an integer >= 1")]
Text = Annotated[str, MinLen(1)]
StringList = Annotated[
    list[Text],
    BeforeValidator(lambda value: [] if value is None else as_list(value)),
    Allowed("a string or a list of strings"),
]
OptionalStringList = Annotated[
    list[Text] | None, BeforeValidator(as_list), Allowed("a string, a list of strings, or null")
]
TokenIdList = Annotated[list[Annotated[int, Ge(0)]], Allowed("a list of token ids")]
FREE_VALUE = "a finite number, a string, true, false, null, or a list or section of these"
FreeValue = Annotated[Any, AfterValidator(_check_plain), Allowed(FREE_VALUE)]
"""Value of a user-defined key: anything that YAML can store."""


def as_section(annotation: Any) -> type[Section] | None:
    """Return the section class behind an annotation, or None if the field is a value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def is_open(field: FieldInfo) -> bool:
    """Return True for a field with user-defined keys: `dict[str, ...]`."""
    return get_origin(field.annotation) is dict


def iter_fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted key, field) for all fields of a section and its subsections, in source order."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        yield key, field
        inner = as_section(field.annotation)
        if inner is not None:
            yield from iter_fields(inner, f"{key}.")


def describe_field(field: FieldInfo) -> str:
    """Describe the values that a field accepts: "an integer >= 1", "one of nccl, gloo", "true or false"."""
    return describe(field.annotation, field.metadata)


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the values of a type, as `describe_field` does."""
    for item in metadata:
        if isinstance(item, Allowed):
            return item.text
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return describe(inner, [*metadata, *more])
    if get_origin(annotation) in (Union, UnionType):
        choices = [describe(choice, metadata) for choice in get_args(annotation) if choice is not type(None)]
        return ", ".join(choices) + " or null"
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    if as_section(annotation) is not None:
        return "a section"
    text = "a non-empty string" if MinLen(1) in metadata else "a string"
    names = {bool: "true or false", int: "an integer", float: "a number", str: text}
    signs = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))
    bounds = [f"{sign} {getattr(item, name)}" for item in metadata for kind, name, sign in signs if type(item) is kind]
    return f"{names[annotation]} {' and '.join(bounds)}".rstrip()


def value_at(tree: object, key: str, default: Any = _MISSING) -> Any:
    """Return the value at a dotted key in nested sections or mappings, else `default`. Without one, raise KeyError."""
    for name in key.split("."):
        if isinstance(tree, Mapping) and name in tree:
            tree = tree[name]
        elif isinstance(tree, Section) and (name in type(tree).model_fields or name in (tree.model_extra or {})):
            tree = getattr(tree, name)
        elif default is _MISSING:
            raise KeyError(key)
        else:
            return default
    return tree


def changed_fields(section: Section) -> set[str]:
    """Return the names of the fields that differ from their defaults."""
    return {name for name, field in type(section).model_fields.items() if value_at(section, name) != field.default}


def with_value(section: Section, key: str, value: object) -> Any:
    """Return a copy of a frozen section with one dotted key replaced."""
    name, _, rest = key.partition(".")
    inner = with_value(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})
