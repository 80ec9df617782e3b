"""Load the typed configuration from Hydra or a nested mapping, and write it as YAML."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, reduce
from operator import getitem
from typing import Any, Generic, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from skyrl_train.aliases import Alias
from skyrl_train.config.base import Section, iter_fields, value_at, with_value
from skyrl_train.config.dialects import ALIASES, SKYRL_WITHOUT_EFFECT
from skyrl_train.config.precedence import Positions, apply_aliases
from skyrl_train.config.problems import Fields, Rule, nearest_keys, raise_problems, read_validation_error, show
from skyrl_train.config.root import REWARD_FUNCTION_ENV, SkyRLConfig
from skyrl_train.config.rules import MACHINE_RULES, RULES, WARNINGS, find_problems
from skyrl_train.errors import ConfigError

logger = logging.getLogger(__name__)

ConfigSource = DictConfig | Mapping[str, Any] | None
C = TypeVar("C", bound=Section)

RUN_PATHS = (
    "trainer.output_dir",
    "trainer.ckpt_path",
    "trainer.export_path",
    "trainer.resume_path",
    "trainer.policy.model.path",
    "trainer.policy.model.lora.lora_path",
)
PATHS = (
    *RUN_PATHS,
    "trainer.critic.model.path",
    "trainer.critic.model.lora.lora_path",
    "trainer.ref.model.path",
    "data.custom_cls.path",
    "custom_reward_function.path",
    "generator.reward_model.path",
    "generator.chat_template.name_or_path",
)
"""Keys in which `~` and `$VARIABLES` are expanded. Some also accept names, but these contain neither."""


def _max_seq_len(cfg: SkyRLConfig) -> int | None:
    n_input = cfg.generator.max_input_length
    return None if n_input is None else n_input + cfg.generator.sampling_params.max_generate_length


def _from_wandb(cfg: Any, variable: str, default: str) -> str:
    return os.environ.get(variable) or default if "wandb" in cfg.trainer.logger else default


Sources = tuple[tuple[str, Callable[[Any], object]], ...]
"""Keys that default to a function of other keys. A function may read keys that earlier rows filled in."""

RUN_SOURCES: Sources = (
    ("trainer.project_name", lambda cfg: _from_wandb(cfg, "WANDB_PROJECT", "skyrl")),
    (
        "trainer.run_name",
        lambda cfg: _from_wandb(cfg, "WANDB_NAME", f"{cfg.trainer.project_name}-{datetime.now():%Y%m%d-%H%M%S}"),
    ),
    ("trainer.ckpt_path", lambda cfg: f"{cfg.trainer.run_dir}/ckpts"),
    ("trainer.export_path", lambda cfg: f"{cfg.trainer.run_dir}/export"),
)

SOURCES: Sources = (
    *RUN_SOURCES,
    ("trainer.ref.model.path", lambda cfg: cfg.trainer.policy.model.path),
    ("trainer.placement.critic_num_nodes", lambda cfg: cfg.trainer.placement.policy_num_nodes),
    ("trainer.placement.critic_num_gpus_per_node", lambda cfg: cfg.trainer.placement.policy_num_gpus_per_node),
    ("trainer.placement.ref_num_nodes", lambda cfg: cfg.trainer.placement.policy_num_nodes),
    ("trainer.placement.ref_num_gpus_per_node", lambda cfg: cfg.trainer.placement.policy_num_gpus_per_node),
    ("trainer.algorithm.temperature", lambda cfg: cfg.generator.sampling_params.temperature),
    ("trainer.algorithm.overlong_buffer_penalty_factor", lambda _: 1.0),  # SkyRL's scripts add it: `+key` needs null
    (
        "generator.eval_sampling_params.max_generate_length",
        lambda cfg: cfg.generator.sampling_params.max_generate_length,
    ),
    # With several turns, the limit is the model's context, which is still unknown here.
    ("generator.max_input_length", lambda cfg: cfg.trainer.max_prompt_length if cfg.generator.max_turns == 1 else None),
    ("trainer.algorithm.max_seq_len", _max_seq_len),
)


def _play_reward_function(cfg: SkyRLConfig) -> SkyRLConfig:
    """If `custom_reward_function` is set, use its environment for all rows."""
    function, default_env = cfg.custom_reward_function, type(cfg.environment).model_fields["env_class"].default
    if function.path is None or cfg.environment.env_class not in (default_env, REWARD_FUNCTION_ENV):
        return cfg
    cfg = with_value(cfg, "environment.env_class", REWARD_FUNCTION_ENV)
    gym = cfg.environment.skyrl_gym
    sections = {**gym.model_dump(), REWARD_FUNCTION_ENV: {"path": function.path, "name": function.name}}
    return with_value(cfg, "environment.skyrl_gym", type(gym).model_validate(sections))


@dataclass(frozen=True)
class Schema(Generic[C]):
    """How to load the configuration of one kind of run: root section, aliases, rules and sources of defaults."""

    root: type[C]
    config_name: str  # Hydra's YAML file of defaults, without suffix
    aliases: Mapping[str, Alias]
    without_effect: Mapping[str, str]
    paths: tuple[str, ...]
    sources: Sources
    rules: tuple[Rule, ...]
    machine_rules: tuple[Rule, ...]
    warnings: tuple[Rule, ...]
    derive: Callable[[C], C] | None = None  # sets keys that depend on several others

    @cached_property
    def fields(self) -> Fields:
        """Every key of the configuration, sections included."""
        return dict(iter_fields(self.root))


RL = Schema(
    root=SkyRLConfig,
    config_name="ppo_base_config",
    aliases=ALIASES,
    without_effect=SKYRL_WITHOUT_EFFECT,
    paths=PATHS,
    sources=SOURCES,
    rules=RULES,
    machine_rules=MACHINE_RULES,
    warnings=WARNINGS,
    derive=_play_reward_function,
)
"""The configuration of reinforcement learning."""


def load_config(source: ConfigSource = None) -> SkyRLConfig:
    """Load the typed configuration: resolve aliases, check types and rules, and fill in the nulls of `SOURCES`.

    `source` is nested and may set any subset of the keys. Missing keys get their defaults. Rules about the machine are
    not checked here but in `validate_cfg`.

    Raises:
        ConfigError: lists all problems.
    """
    return _load(source, RULES, RL, None)


def validate_cfg(cfg: SkyRLConfig | ConfigSource, extra_rules: tuple[Rule, ...] = ()) -> SkyRLConfig:
    """Load a configuration and also check `extra_rules` and the machine (installed packages, tracker logins).

    Raises:
        ConfigError: lists all problems.
    """
    return validate(cfg, RL, extra_rules)


def validate(
    cfg: C | ConfigSource, schema: Schema[C], extra_rules: tuple[Rule, ...] = (), positions: Positions | None = None
) -> C:
    """Check a configuration as `validate_cfg` does, for any kind of run. For `positions`, see `apply_aliases`."""
    rules = schema.rules + extra_rules + schema.machine_rules
    if not isinstance(cfg, schema.root):
        assert not isinstance(cfg, Section), f"a {type(cfg).__name__} is not a {schema.root.__name__}"
        return _load(cfg, rules, schema, positions)
    cfg = resolve(cfg, schema)
    raise_problems(find_problems(cfg, rules))
    return cfg


def to_yaml(cfg: Section) -> str:
    """Return the resolved configuration as YAML. `load_config(yaml.safe_load(text))` is the inverse.

    Non-ASCII characters are escaped, because PyYAML does not read all of them back as it writes them.
    """
    return str(yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False, width=1000))


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return a line such as "trainer.epochs: 1 -> 2" for each key that differs between two dumped configurations."""
    lines = []
    for name in [*before, *(name for name in after if name not in before)]:
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += changed_settings(old, new, f"{prefix}{name}.")
        elif old != new:
            lines.append(f"{prefix}{name}: {show(old)} -> {show(new)}")
    return lines


def resolve(cfg: C, schema: Schema[C]) -> C:
    """Return a copy with expanded paths and with the nulls of `schema.sources` filled in where possible."""
    for key in schema.paths:
        path = value_at(cfg, key)
        if path is not None:
            cfg = with_value(cfg, key, os.path.expandvars(os.path.expanduser(path)))
    for key, source in schema.sources:
        if value_at(cfg, key) is None:
            cfg = with_value(cfg, key, source(cfg))
    return cfg if schema.derive is None else schema.derive(cfg)


def _load(source: ConfigSource, rules: tuple[Rule, ...], schema: Schema[C], positions: Positions | None) -> C:
    """Return a configuration after aliases, types, derived values and rules. Report all problems in one ConfigError.

    `rules` has the schema's own rules, and maybe more.
    """
    tree = _as_tree(source)
    problems = apply_aliases(tree, schema.aliases, schema.without_effect, schema.fields, positions)
    refused: dict[str, str] = {}
    try:
        cfg = schema.root.model_validate(tree)
    except ValidationError as error:
        # Reset the rejected keys to their defaults, so that the rules can check the other keys.
        refused, paths = read_validation_error(error, tree, schema.fields)
        for *sections, name in paths:
            reduce(getitem, sections, tree).pop(name, None)  # two errors may reject the same value
        cfg = schema.root.model_validate(tree)
    cfg = resolve(cfg, schema)
    if not refused.keys() <= schema.fields.keys():
        # An unknown key is probably misspelled, so the key that was meant still has its default. Further rules look up
        # files and models, and would look up the wrong ones.
        rules = schema.rules
    # A problem that names a rejected key, or one that may have been meant, follows from its default.
    reset = [key for name in refused for key in (name, *nearest_keys(name, schema.fields))]
    mentions = tuple(text for key in reset for text in (f"{key}=", f"{key}."))
    broken = [text for text in find_problems(cfg, rules) if not any(mention in text for mention in mentions)]
    raise_problems([*problems, *refused.values(), *broken])
    for sentence in find_problems(cfg, schema.warnings):
        logger.warning(sentence)
    return cfg


def _as_tree(source: ConfigSource) -> dict[str, Any]:
    """Convert to nested dicts and lists. Resolve interpolations and drop Hydra's own sections."""
    if isinstance(source, DictConfig):
        try:
            source = OmegaConf.to_container(source, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{error.full_key}: {reason}; set {error.full_key}=<value>") from None
    if not isinstance(source, Mapping | None):
        raise ConfigError(f"the configuration is {show(source)}, but it must be a mapping of sections")

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(name): plain(inner) for name, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value

    tree: dict[str, Any] = plain(source or {})
    return {name: value for name, value in tree.items() if name not in ("hydra", "defaults")}
