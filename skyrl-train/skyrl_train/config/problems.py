"""What is wrong with a configuration, one sentence per problem: the key, its value, what is allowed, a fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from skyrl_train.config.base import as_section, describe_field, iter_fields, value_at
from skyrl_train.config.root import SkyRLConfig
from skyrl_train.errors import ConfigError

FIELDS: dict[str, FieldInfo] = dict(iter_fields(SkyRLConfig))
"""Every key of the configuration, sections included."""

OPEN_SECTION = "environment.skyrl_gym"
"""The one section that takes free sections, one per environment class."""

N_SUGGESTIONS = 3


def config_error(problems: Iterable[str]) -> ConfigError:
    """One error that lists every problem."""
    sentences = list(dict.fromkeys(problems))
    if len(sentences) == 1:
        return ConfigError(sentences[0])
    lines = "".join(f"\n  - {sentence}" for sentence in sentences)
    return ConfigError(f"{len(sentences)} problems in the configuration:{lines}")


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one ConfigError that lists every problem; do nothing when there is none."""
    sentences = list(problems)
    if sentences:
        raise config_error(sentences)


def show(value: object) -> str:
    """A value as it is written on the command line; a string that would read as something else keeps its quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return value if value and value.isprintable() and not _reads_as_something_else(value) else repr(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    return str(value)


def _reads_as_something_else(text: str) -> bool:
    if text.lower() in ("null", "true", "false"):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


def nearest_keys(key: str) -> list[str]:
    """Up to three valid keys that an unknown one may have meant, the likeliest first.

    In this order: keys elsewhere with the same last name, misspelt siblings; else any key that looks alike.
    """
    parent, _, name = key.rpartition(".")
    valid = [known for known, field in FIELDS.items() if as_section(field.annotation) is None]
    same_name = [known for known in valid if known.rpartition(".")[2] == name]
    siblings = [known.rpartition(".")[2] for known in valid if known.rpartition(".")[0] == parent]
    misspelt = [f"{parent}.{match}" for match in get_close_matches(name, siblings, cutoff=0.75)]
    likely = [*sorted(same_name, key=lambda known: -_similarity(key, known)), *misspelt]
    return likely[:N_SUGGESTIONS] or get_close_matches(key, valid, n=N_SUGGESTIONS, cutoff=0.75)


def _similarity(left: str, right: str) -> float:
    return SequenceMatcher(None, left, right).ratio()


def unknown_key(key: str, value: object) -> str:
    """The sentence for a key that does not exist."""
    return f"{key}={show(value)}: there is no key {key}; {_did_you_mean(key)}"


def _did_you_mean(key: str) -> str:
    suggestions = nearest_keys(key)
    return f"did you mean {' or '.join(suggestions)}?" if suggestions else "remove it"


def wrong_value(key: str, value: object) -> str:
    """The sentence for a value that the field of this key does not accept."""
    field = FIELDS[key]
    if as_section(field.annotation) is not None:
        return f"{key}={show(value)} must be {describe_field(field)}; set its keys one by one: {key}.<name>=<value>"
    default = field.get_default()
    return f"{key}={show(value)} must be {describe_field(field)}; the default is {key}={show(default)}"


def from_validation_error(error: ValidationError, tree: Mapping[str, Any]) -> list[str]:
    """One sentence per key that pydantic refused; `tree` is what was validated."""
    sentences: dict[str, str] = {}
    for item in error.errors(include_url=False, include_input=False, include_context=False):
        if item["type"] == "extra_forbidden":
            key = ".".join(str(name) for name in item["loc"])
            sentences.update((leaf, unknown_key(leaf, value)) for leaf, value in leaves(value_at(tree, key), key))
            continue
        known = _longest_known(item["loc"])
        if known == OPEN_SECTION and isinstance(value_at(tree, known), Mapping):
            key = f"{known}.{item['loc'][len(known.split('.'))]}"
            sentences[key] = _wrong_open_section(key, value_at(tree, key))
        else:
            sentences[known] = wrong_value(known, value_at(tree, known))
    return list(sentences.values())


def leaves(value: object, key: str) -> Iterator[tuple[str, object]]:
    """Every value inside nested mappings, with its dotted key; an empty mapping is a value."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}")
    else:
        yield key, value


def _longest_known(loc: tuple[int | str, ...]) -> str:
    """The key that an error is about: pydantic adds list positions behind it."""
    keys = [".".join(str(name) for name in loc[:n]) for n in range(len(loc), 0, -1)]
    return next(key for key in keys if key in FIELDS)


def _wrong_open_section(key: str, value: object) -> str:
    name = key.rpartition(".")[2]
    return (
        f"{key}={show(value)}: there is no key {key}; {_did_you_mean(key)} "
        f"(settings for an environment of class {name} are a section: {key}.<name>=<value>)"
    )
