"""Translation of command lines for verl's `main_ppo` and `fsdp_sft_trainer` into our overrides."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import TypeVar

from hydra.core.override_parser.types import Override

from skyrl_report.settings import leaves
from skyrl_train.compat.verl.keys import CORRECTION, ROLLOUT
from skyrl_train.compat.verl.programs import (
    ENGINE_OPTIONS,
    FSDP_SFT_TRAINER,
    PROGRAMS,
    REJECTION,
    Settings,
    VerlProgram,
)
from skyrl_train.config.cli import changed_keys, is_override, parse_override
from skyrl_train.config.problems import OPEN_SECTION, did_you_mean, open_fields, raise_problems, show
from skyrl_train.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

RESUME_MODES = {"auto": "latest", "disable": "none", "resume_path": "from_path"}
"""verl's values of `trainer.resume_mode`, mapped to ours."""

PROCESSES = {
    "nnodes": "trainer.placement.policy_num_nodes",
    "nproc_per_node": "trainer.placement.policy_num_gpus_per_node",
}
"""Options of torchrun, mapped to our keys."""

TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")

REJECTIONS = {
    "token": ("token_mask_is_threshold", None),
    "sequence": ("product_mask", "product"),
    "geometric": ("geo_mask", "geometric"),
    "token_k1": ("token_mask_is_threshold", None),  # from here on, names of newer versions
    "seq_sum_k1": ("product_mask", "product"),
    "seq_mean_k1": ("geo_mask", "geometric"),
}
"""Values of `rollout_rs`, mapped to our keys for the bounds (without `_low` or `_high`) and `sequence_mask_metric`."""


def read_command(words: Sequence[str]) -> tuple[VerlProgram, list[str]]:
    """Return the program, and its options as our overrides.

    `words` may be a complete command line: `torchrun --nproc_per_node=1 -m verl.trainer.fsdp_sft_trainer
    optim.lr=2e-6`. Each translated option is logged, as is the launcher that the command line starts with.

    Raises:
        ConfigError: the words contain no program, or options cannot be honored. The message lists all of them.
    """
    position = _find_program(words)
    program = PROGRAMS[_last_name(words[position])]
    return program, translate([*_read_launcher(words[:position], program), *words[position + 1 :]], program)


def find_torchrun_flags(words: Sequence[str]) -> list[str]:
    """Return torchrun's flags in a command line, except those for the number of processes."""
    flags = _split_torchrun_flags(words[: _find_program(words)])
    return [word for flag in flags if _find_count(flag) is None for word in flag]


def _find_program(words: Sequence[str]) -> int:
    """Return the program's index among a command line's words."""
    for index, word in enumerate(words):
        if _last_name(word) in PROGRAMS:
            return index
    raise ConfigError(
        f"skyrl verl {' '.join(words)} contains none of verl's programs {', '.join(PROGRAMS)}; write e.g. skyrl verl "
        "main_ppo algorithm.adv_estimator=grpo, or skyrl verl before a complete command line"
    )


def _last_name(word: str) -> str:
    return word.rpartition(".")[2]


def _read_launcher(words: Sequence[str], program: VerlProgram) -> Iterator[str]:
    """Yield overrides for the part of the command line before the program. Log each flag of torchrun."""
    ignored = list(takewhile(lambda word: not _is_torchrun(word), words))
    if not all(word == "-m" or re.fullmatch(r"(.*/)?python[\d.]*", word) for word in ignored):
        logger.warning("%s has no effect, because skyrl runs the program and starts its processes", " ".join(ignored))
    if ignored == list(words):
        return
    starts_ranks = program is FSDP_SFT_TRAINER
    if starts_ranks:
        logger.warning("torchrun is read as trainer.placement.launcher=torchrun")
        yield "trainer.placement.launcher=torchrun"
    for flag in _split_torchrun_flags(words):
        text = " ".join(flag)
        if key := _find_count(flag):
            number = re.split("[= ]", text)[-1]
            logger.warning("%s is read as %s=%s", text, key, number)
            yield f"{key}={number}"
        elif starts_ranks:
            logger.warning("%s is an option of torchrun, which starts the ranks", text)
        else:
            logger.warning("%s has no effect, because Ray starts the processes for reinforcement learning", text)


def _is_torchrun(word: str) -> bool:
    return word.rpartition("/")[2] in TORCHRUN


def _split_torchrun_flags(words: Sequence[str]) -> list[list[str]]:
    """Return the flags after `torchrun`, each with its value if that is a separate word, or [] without `torchrun`."""
    start = next((index for index, word in enumerate(words) if _is_torchrun(word)), len(words))
    flags: list[list[str]] = []
    for word in words[start + 1 :]:
        if word.startswith("-"):
            flags.append([word])
        elif flags and "=" not in flags[-1][0]:
            flags[-1].append(word)
    return [flag for flag in flags if flag != ["-m"]]


def _find_count(flag: Sequence[str]) -> str | None:
    """Return our key if a flag sets a number of processes, otherwise None."""
    return PROCESSES.get(flag[0].partition("=")[0].lstrip("-").replace("-", "_"))


def translate(argv: Sequence[str], program: VerlProgram) -> list[str]:
    """Translate the options of a verl program into our overrides, in order.

    Options that are dropped or changed are logged, as are verl's defaults. The alias tables log the rest.

    Raises:
        ConfigError: options cannot be parsed or honored. The message lists all of them.
    """
    options: dict[str, object] = {}  # the last value of each
    parsed: list[Override | str] = []
    problems: dict[str, str] = {}  # by option, because only its last value counts
    for text in argv:
        try:
            parsed.append(parse_override(text) if is_override(text) else text)
        except ConfigError as error:
            problems[text] = str(error)
            continue
        if isinstance(option := parsed[-1], Override):
            options[option.key_or_group] = option.value()
    overrides: list[str] = []
    for option in parsed:
        if isinstance(option, str):
            overrides.append(option)  # reported when the overrides are parsed
            continue
        problems.pop(option.key_or_group, None)
        try:
            overrides += _translate_option(option, options, program)
        except ConfigError as error:
            problems[option.key_or_group] = str(error)
    raise_problems(problems.values())
    settings = _read_settings([parse_override(text) for text in overrides if is_override(text)], program)
    defaults = [
        f"{key}={show(value)}"
        for key, value in {**program.defaults, **program.derive(settings)}.items()
        if key not in settings
    ]
    if defaults:
        logger.warning("verl's defaults: %s", " ".join(defaults))
    return [*defaults, *overrides]


def _read_settings(overrides: Sequence[Override], program: VerlProgram) -> Settings:
    """Return our keys that the overrides set or delete, under any alias."""
    schema, settings = program.schema, dict[str, object]()
    for override in overrides:
        if override.is_delete():
            values: dict[str, object] = dict.fromkeys(changed_keys(override, schema.fields))
        else:
            values = dict(leaves(override.value(), override.key_or_group))
        for key, value in values.items():
            alias = schema.aliases.get(key)
            settings |= {key: value} if alias is None else dict(alias.readings(value))
    if "trainer.policy.optimizer_config.num_warmup_steps" in settings:
        settings.setdefault("trainer.policy.optimizer_config.warmup_ratio", None)  # the two are alternatives
    return settings


def _translate_option(option: Override, options: Mapping[str, object], program: VerlProgram) -> list[str]:
    """Return the overrides for an option, or [] if it has no effect. Raise ConfigError if it cannot be honored."""
    key, value = option.key_or_group, option.value()
    if option.is_delete():
        return [str(option.input_line)]
    if problem := _find_problem(key, value, program):
        raise ConfigError(problem)
    text = f"{key}={show(value)}"
    if reason := _find_reason(key, value, options, program):
        logger.warning("%s has no effect: %s", text, reason)
        return []
    if key.startswith(REJECTION):
        return _read_rejection(options) if key == REJECTION else []
    new_key = None
    if key == "hydra.run.dir":
        new_key = "trainer.output_dir"
    elif key.startswith(f"{ENGINE_OPTIONS}."):
        new_key = f"generator.engine_init_kwargs.{key.removeprefix(f'{ENGINE_OPTIONS}.').partition('.')[2]}"
    elif key in program.conditional:
        new_key = program.conditional[key].key
    if new_key is not None:
        logger.warning("%s is read as %s=%s", text, new_key, show(value))
        return [f"{new_key}={str(option.input_line).partition('=')[2]}"]  # with its quotes
    if key == "trainer.resume_mode" and isinstance(value, str) and value in RESUME_MODES:
        logger.warning("%s is read as %s=%s", text, key, RESUME_MODES[value])
        return [f"{key}={RESUME_MODES[value]}"]
    return [str(option.input_line)]


def _find_reason(key: str, value: object, options: Mapping[str, object], program: VerlProgram) -> str | None:
    """Return the reason why an option has no effect, or None if it has one."""
    if _look_up(key, program.refused) is not None or (key == REJECTION and _is_off(value)):
        return "the option is off"
    if (conditional := _look_up(key, program.conditional)) is not None:
        return f"it applies only with {conditional.switch}" if _is_off(options.get(conditional.switch)) else None
    if (fixed := _look_up(key, program.fixed)) is not None:
        return fixed.reason
    if key == "data.seed" and value is None:
        return "a run always has a seed, trainer.seed"
    if key.startswith(f"{ENGINE_OPTIONS}."):
        engine = key.removeprefix(f"{ENGINE_OPTIONS}.").partition(".")[0]
        backend = options.get(f"{ROLLOUT}.name", options.get("generator.backend"))
        if engine != backend:
            return f"the engine is {show(backend or 'auto')}"
        if value is None:
            return "the engine has its own default"
    return None


def _read_rejection(options: Mapping[str, object]) -> list[str]:
    """Return the overrides for verl's rejection of tokens or trajectories, which combines three options.

    Raises:
        ConfigError: the kind of rejection has no counterpart, or its threshold is missing or invalid.
    """
    name, threshold = options[REJECTION], options.get(f"{REJECTION}_threshold")
    if str(name) not in REJECTIONS:
        raise ConfigError(
            f"{REJECTION}={show(name)} is not supported; use one of {', '.join(REJECTIONS)}, or the keys under "
            f"{CORRECTION}"
        )
    bounds, metric = REJECTIONS[str(name)]
    below, separator, above = ("" if threshold is None else str(threshold)).rpartition("_")
    lower = options.get(f"{REJECTION}_threshold_lower")
    try:
        high = float(above)  # 2.0 means 0.5 to 2, and 0.5_2.0 gives both bounds
        low = float(below if separator else 1 / high if lower is None else str(lower))
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f"{REJECTION}_threshold={show(threshold)} must be a number, such as 2.0, or two, such as '0.5_2.0', with "
            f"{REJECTION}"
        ) from None
    overrides = [f"{CORRECTION}.{bounds}_low={low}", f"{CORRECTION}.{bounds}_high={high}"]
    if metric is not None:
        overrides.append(f"{CORRECTION}.sequence_mask_metric={metric}")
    logger.warning("%s=%s is read as %s", REJECTION, name, " ".join(overrides))
    return overrides


def _find_problem(key: str, value: object, program: VerlProgram) -> str | None:
    """Return the problem and its fix if a verl option cannot be honored, otherwise None."""
    option = f"{key}={show(value)}"
    if (fix := _look_up(key, program.refused)) is not None:
        return None if _is_off(value) else f"{option} is not supported; {fix}"
    if _look_up(key, program.conditional) is not None:
        return None
    if (fixed := _look_up(key, program.fixed)) is not None:
        return None if fixed.accepts(value) else f"{option} is not supported: {fixed.reason}; remove it"
    schema = program.schema
    known = (*schema.fields, *schema.aliases, *schema.without_effect, "hydra.run.dir", *program.combined)
    with_keys_below = (*open_fields(schema.fields), *schema.aliases, OPEN_SECTION, *program.combined)
    if key in known or key.startswith(tuple(f"{name}." for name in with_keys_below)):
        return None
    section, _, name = key.rpartition(".")
    others = (other.rpartition(".") for other in (*schema.aliases, *program.fixed))
    names = [other for place, _, other in others if place == section]
    if nearest := get_close_matches(name, names, n=1, cutoff=0.65):
        return f"{option}: there is no key {key}; did you mean {section}.{nearest[0]}?"
    closed = {name: field for name, field in schema.fields.items() if name not in open_fields(schema.fields)}
    return f"{option}: there is no key {key} here; {did_you_mean(key, closed)}"


def _is_off(value: object) -> bool:
    return value is None or value is False or value == {}


def _look_up(key: str, table: Mapping[str, T]) -> T | None:
    """Return the table's entry for an option, or else for the innermost section around it."""
    while key not in table and "." in key:
        key = key.rpartition(".")[0]
    return table.get(key)
