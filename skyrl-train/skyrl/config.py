"""The configuration of SkyRL's new layout. Dataclasses can extend it.

    @dataclass
    class MyAlgorithmConfig(AlgorithmConfig):
        warmup: int = 10

    MyConfig = make_config(algorithm_cls=MyAlgorithmConfig)
    cfg = MyConfig.from_cli_overrides(["trainer.algorithm.warmup=20"])

`cfg` is a `skyrl_train.config.SkyRLConfig`, with the new keys as fields.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, get_type_hints

import pydantic

from skyrl_train import config
from skyrl_train.compat.skyrl.keys import ALIASES
from skyrl_train.compat.skyrl.names import find_name
from skyrl_train.config import to_yaml as get_config_as_yaml_str
from skyrl_train.config.base import Section, as_section, value_at
from skyrl_train.config.cli import parse
from skyrl_train.config.loading import RL
from skyrl_train.config.problems import show
from skyrl_train.entrypoints.command import exit_on_mistake

__all__ = [
    "AlgorithmConfig",
    "GeneratorConfig",
    "SkyRLTrainConfig",
    "TrainerConfig",
    "get_config_as_yaml_str",
    "make_config",
]

ENGINE = "generator.inference_engine"


class AlgorithmConfig:
    """Base class of dataclasses that add keys to `trainer.algorithm`."""


class TrainerConfig:
    """Base class of dataclasses that add keys to `trainer`."""


class GeneratorConfig:
    """Base class of dataclasses that add keys to `generator`."""


class InferenceEngine:
    """The keys `generator.inference_engine.…` of the new layout, read from `generator`."""

    def __init__(self, generator: Section) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        alias = ALIASES.get(f"{ENGINE}.{name}")
        if alias is None:
            raise AttributeError(f"{ENGINE}.{name} is not a key that can be read here")
        return value_at(self._generator, alias.key.removeprefix("generator."))


class _Generator(config.GeneratorConfig):
    @property
    def inference_engine(self) -> InferenceEngine:
        return InferenceEngine(self)


class _Root(config.SkyRLConfig):
    generator: _Generator = _Generator()


class SkyRLTrainConfig:
    """Parser of the configuration. Subclasses that are dataclasses may add sections."""

    sections: ClassVar[Mapping[str, type]] = {}
    """Dataclasses that add keys to a section, by the section's name."""

    @classmethod
    def from_cli_overrides(cls, args: Sequence[str] | Mapping[str, Any]) -> config.SkyRLConfig:
        """Parse overrides: `["trainer.epochs=3"]` or `{"trainer.epochs": 3}`.

        If `args` is the command line of this process, a mistake prints one message and exits.

        Raises:
            ConfigError: the configuration is invalid. The message lists every problem.
        """
        given = [f"{key}={show(value)}" for key, value in args.items()] if isinstance(args, Mapping) else list(args)
        additions = {"": cls, **cls.sections}
        defaults = []  # of existing keys that a dataclass changes
        for section, added in additions.items():
            for field in _declared(added):
                key = f"{section}.{field.name}".removeprefix(".")
                if key in RL.fields and field.default is not MISSING:
                    defaults.append(f"{key}={show(field.default)}")
        root = _extend(_Root, "", additions)
        schema = replace(RL, root=root)
        with exit_on_mistake(is_program=given == sys.argv[1:]):
            return parse([*defaults, *map(_without_json, given)], schema)


def make_config(
    algorithm_cls: type | None = None, trainer_cls: type | None = None, generator_cls: type | None = None
) -> type[SkyRLTrainConfig]:
    """Return a `SkyRLTrainConfig` extended by the fields of the dataclasses."""
    added = {"trainer.algorithm": algorithm_cls, "trainer": trainer_cls, "generator": generator_cls}
    sections = {key: section for key, section in added.items() if section is not None}
    return type("ExtendedConfig", (SkyRLTrainConfig,), {"sections": sections})


def _without_json(text: str) -> str:
    """Convert an override with a JSON value, `key={"a": "b"}`, to Hydra's grammar: `key={a:b}`."""
    key, _, value = text.partition("=")
    try:
        section = json.loads(value) if value.startswith("{") else None
    except ValueError:
        return text
    return text if section is None else f"{key}={show(section)}"


def _declared(added: type) -> Iterator[Field[Any]]:
    """Yield the fields of a dataclass, or nothing for other classes."""
    yield from fields(added) if is_dataclass(added) else ()


def _extend(section: type[Section], key: str, additions: Mapping[str, type]) -> Any:
    """Return a subclass of a section, with the new keys of `additions` for the section and its subsections."""
    new: dict[str, Any] = {}
    for name, known in section.model_fields.items():
        inner, inner_key = as_section(known.annotation), f"{key}.{name}".removeprefix(".")
        if inner is not None and any(f"{added}.".startswith(f"{inner_key}.") for added in additions):
            extended = _extend(inner, inner_key, additions)
            new[name] = (extended, pydantic.Field(default=extended(), description=known.description))
    added = additions.get(key)
    for field in () if added is None else _declared(added):
        if field.name not in section.model_fields:
            annotation = get_type_hints(added)[field.name]
            factory = None if field.default_factory is MISSING else field.default_factory
            default = {"default_factory": factory} if factory else {"default": field.default}
            new[field.name] = (annotation, pydantic.Field(description="A key of the script.", **default))
    return pydantic.create_model(section.__name__, __base__=section, **new) if new else section


def __getattr__(name: str) -> Any:
    value = None if name.startswith("_") else vars(config).get(name)
    return find_name("config", name) if value is None or isinstance(value, ModuleType) else value
