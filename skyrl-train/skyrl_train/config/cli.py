"""Parse command lines in Hydra's grammar.

`parse` applies overrides itself because it needs their order: the last spelling of a key wins.

`@hydra.main` rejects keys that are not in its YAML, unless their section is open. Aliases and user-defined keys must
get past it, so the RL YAML includes `OPEN_SECTIONS`. `load_config` then resolves them, and suggests the nearest keys
for a mistyped one.
"""

import logging
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from skyrl_train.config.loading import RL, C, Schema, validate
from skyrl_train.config.problems import FIELDS, Fields, Rule, did_you_mean, raise_problems, show
from skyrl_train.config.root import SkyRLConfig
from skyrl_train.errors import ConfigError

logger = logging.getLogger(__name__)

config_dir = str(Path(__file__).parent)
"""The folder that `@hydra.main(config_path=config_dir, config_name="ppo_base_config")` reads."""

PRESET = "preset"
PRESETS = sorted(path.stem for path in (Path(__file__).parent / PRESET).glob("*.yaml"))
"""Values of `+preset=NAME`: settings for a kind of machine, which other settings override."""

OPEN_SECTIONS = DictConfig({name: DictConfig({}, flags={"struct": False}) for name in SkyRLConfig.model_fields})
ConfigStore.instance().store(name="open_sections", node=OPEN_SECTIONS)


def parse_cli(argv: Sequence[str], extra_rules: tuple[Rule, ...] = (), file: Path | None = None) -> SkyRLConfig:
    """Parse and check overrides such as `["trainer.epochs=3", "trainer.logger=[console,wandb]"]`.

    They override the settings in the YAML `file`, if given. `skyrl_train.entrypoints.main_base.parse_cli` also checks
    the rules of estimators and losses.

    Raises:
        ConfigError: lists all problems.
    """
    return parse(argv, RL, extra_rules, file)


def parse(argv: Sequence[str], schema: Schema[C], extra_rules: tuple[Rule, ...] = (), file: Path | None = None) -> C:
    """Parse a command line as `parse_cli` does, for any kind of run. Overrides then change the file's settings."""
    raise_problems(sentence for text in _join_flags(argv) for sentence in _not_one_override(text, schema.fields))
    overrides = [parse_override(text) for text in argv]
    of_hydra = [_with_preset(override, schema) for override in overrides if is_of_hydra(override)]
    overrides = [override for override in overrides if not is_of_hydra(override)]
    from_file = {} if file is None else _read_yaml(file)
    problems: list[str] = []
    defaults = OmegaConf.to_container(compose_config(of_hydra, schema.config_name))
    settings = OmegaConf.create(_merge(defaults, from_file, "", problems))
    raise_problems(problems)
    positions = dict.fromkeys((key for name, value in from_file.items() for key in _keys(str(name), value)), 0)
    for position, override in enumerate(overrides, start=1):
        positions |= dict.fromkeys(changed_keys(override, schema.fields), position)
        problems += _apply(override, settings, schema.fields)
    raise_problems(problems)
    return validate(settings, schema, extra_rules, positions)


def _with_preset(override: Override, schema: Schema[C]) -> str:
    """Return the text of one of Hydra's overrides. `+preset=auto` names the preset of this machine.

    Raise ConfigError if there is no such preset, or if it has no settings for this kind of run.
    """
    text = str(override.input_line)
    if override.key_or_group != PRESET:
        return text
    name = override.value()
    if schema.config_name != RL.config_name:
        raise ConfigError(f"{text}: presets are for reinforcement learning; set the keys one by one")
    if name == "auto":
        name = _choose_preset()
        logger.info("This machine takes the settings of preset=%s", name)
    if name not in PRESETS:
        raise ConfigError(f"{text}: there is no such preset; use one of auto, {', '.join(PRESETS)}")
    return f"+{PRESET}={name}"


def _choose_preset() -> str:
    """Return the name of the preset for the GPUs that `nvidia-smi` lists, without waiting for PyTorch to load."""
    try:
        query = [
            shutil.which("nvidia-smi") or "nvidia-smi",
            "--query-gpu=memory.total",
            "--format=csv,noheader,nounits",
        ]
        output = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "cpu_tiny"
    sizes = [int(line) for line in output.split() if line.isdigit()]  # MiB
    if not sizes:
        return "cpu_tiny"
    if len(sizes) >= 8:
        return "eight_gpu"
    return "single_gpu_80gb" if min(sizes) > 70_000 else "single_gpu_24gb"


def _read_yaml(file: Path) -> dict[Any, Any]:
    try:
        settings = OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot read --config {file}: {reason}. Pass a YAML file of settings.") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--config {file} holds a {type(settings).__name__}, but it must be a mapping of sections")
    return settings


def _merge(defaults: Any, settings: Any, key: str, problems: list[str]) -> Any:
    """Return the nested defaults, overridden by `settings`. Report each section that a list or scalar would replace."""
    if isinstance(defaults, dict) and isinstance(settings, dict):
        return defaults | {
            name: _merge(defaults.get(name), value, f"{key}.{name}".removeprefix("."), problems)
            for name, value in settings.items()
        }
    if defaults and isinstance(defaults, dict) and settings is not None:
        problems.append(f"{key}={show(settings)} must be a section; set its keys one by one: {key}.<name>=<value>")
    return settings


def _apply(override: Override, settings: DictConfig, fields: Fields) -> Iterator[str]:
    """Apply an override as Hydra does. Yield a sentence if it deletes a missing key or sets a key inside a value."""
    key, value = override.key_or_group, override.value()
    section, _, name = key.rpartition(".")
    try:
        if not override.is_delete():
            OmegaConf.update(settings, key, value, merge=True, force_add=True)
            return
        parent = OmegaConf.select(settings, section) if section else settings
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        yield f"cannot apply {override.input_line}: {reason}. Remove it, or make {section} a section of settings."
        return
    if not isinstance(parent, DictConfig) or name not in parent:
        yield f"~{key}: there is no key {key} to delete; {did_you_mean(key, fields)}"
    elif value is not None and value != parent[name]:
        yield f"~{key}={show(value)} deletes only that value, but {key}={show(parent[name])}; write ~{key}"
    else:
        del parent[name]


def changed_keys(override: Override, fields: Fields) -> set[str]:
    """Return the keys that an override sets or deletes, including all keys under them."""
    key = override.key_or_group
    if override.is_delete():
        return {key, *(known for known in fields if known.startswith(f"{key}."))}
    return set(_keys(key, override.value()))


def _keys(key: str, value: object) -> Iterator[str]:
    """Yield a key and all keys nested in its value."""
    yield key
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _keys(f"{key}.{name}", inner)


def compose_config(overrides: Sequence[str], config_name: str = RL.config_name) -> DictConfig:
    """Compose overrides as `@hydra.main` does. Raise ConfigError if Hydra rejects them."""
    running = GlobalHydra.instance().hydra  # of an `@hydra.main` function that may be running
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=config_dir, version_base=None):
            return compose(config_name=config_name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot apply these overrides: {' '.join(overrides)} ({reason})") from error
    finally:
        GlobalHydra.instance().hydra = running


def parse_override(text: str) -> Override:
    """Parse an override. Raise ConfigError if that fails.

    A value that looks like a number is quoted if its key takes a string, e.g. trainer.run_name=2026_11_28.
    """
    key, _, value = text.partition("=")
    field = FIELDS.get(key.lstrip("+"))
    options = () if field is None else (field.annotation, *get_args(field.annotation))
    kinds = {get_args(option)[0] if get_origin(option) is Annotated else option for option in options}
    is_text = str in kinds and not kinds & {int, float, bool}
    if is_text and re.fullmatch(r"[-+]?[\d._]+(?:e[-+]?\d+)?", value, re.I):
        text = f"{key}='{value}'"
    try:
        return OverridesParser.create().parse_override(quote_home(text))
    except HydraException as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{text} cannot be read ({reason}); {_suggest_quotes(key, value)}") from error


def _suggest_quotes(key: str, value: str) -> str:
    """Return how to write a value that Hydra cannot read: the first form with quotes that it can."""
    if re.fullmatch(r"\[.*\]", value):
        items = [item.strip(" '\"") for item in value[1:-1].split(",")]
        forms = {f"[{','.join(repr(item) for item in items if item)}]": "items"}
    else:
        forms = {f"'{value}'": "value", f'"{value}"': "value"} if value[:1] not in "{(" else {}
    for form, part in forms.items():
        with suppress(HydraException):
            OverridesParser.create().parse_override(f"{key}={form}")
            escaped = form.replace('"', '\\"')
            return f'quote the {part}: "{key}={escaped}"'
    return "write a list as [a,b] and a mapping as {name:value}, and quote other text"


def quote_home(text: str) -> str:
    """Quote paths such as `~/models`, because in Hydra's grammar `~` deletes a key."""
    return text if {"'", '"'} & set(text) else re.sub(r"(?<=[=\[,])(~[\w./-]*)", r"'\1'", text)


def is_of_hydra(override: Override) -> bool:
    """Return True for Hydra's own keys, and for `+preset=NAME`, which Hydra reads from the folder `config/preset`."""
    key = str(override.key_or_group)
    return key == PRESET or key.startswith(("hydra.", "hydra/"))


def is_override(text: str) -> bool:
    """Return False for flags such as `--help`, `--config-name other` or `--multirun`, which Hydra also accepts."""
    return not text.startswith("-") and ("=" in text or text.startswith("~"))


def _join_flags(argv: Sequence[str]) -> Iterator[str]:
    """Yield the arguments, with a flag and its value joined: `--epochs 3`."""
    texts = iter([*argv, ""])
    text = next(texts)
    for following in texts:
        is_flag = text.startswith("-") and "=" not in text
        if is_flag and following and not following.startswith("-") and not is_override(following):
            text = f"{text} {following}"
        else:
            yield text
            text = following


def _not_one_override(text: str, fields: Fields) -> list[str]:
    """Return the problem of an argument that is a flag, a bare word, a sweep or has a package (`@`), else []."""
    names = {*fields, *(key.rpartition(".")[2] for key in fields)}
    flag = text.lstrip("-") if "=" in text else text.lstrip("-").replace(" ", "=", 1)
    if text.startswith("-") and flag.partition("=")[0] not in names:
        return [f"this command has no option {text}; pass settings as key=value"]
    if not is_override(text):
        word, equals, value = flag.partition("=")
        keys = [key for key in fields if key.rpartition(".")[2] == word] or [word or "<key>"]
        fix = " or ".join(f"{key}={value or '<value>'}" for key in keys)
        return [f"{text} is not an override; write {fix}{'' if equals else ', without spaces around ='}"]
    try:
        override = parse_override(text)
    except ConfigError as error:
        return [str(error)]
    key, equals, value = text.partition("=")
    if override.is_sweep_override():
        fix = "choose one value" if "(" in value else f"for a list, write {key}=[{value}]"
        return [f"{text} is a sweep over several runs, but this command starts one run; {fix}"]
    if override.package is not None and not is_of_hydra(override):
        return [f"{text} names a package, which has no meaning here; write {key.partition('@')[0]}{equals}{value}"]
    return []
