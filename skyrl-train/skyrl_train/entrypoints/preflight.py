"""Checks of the files, folders and names that a run needs, before PyTorch is imported or the Hub is contacted."""

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from skyrl_gym.data.files import find_fault
from skyrl_train.algorithms.registry import advantage_estimator, policy_loss
from skyrl_train.algorithms.rules import loads_reference, reads_reference
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.base import value_at
from skyrl_train.config.policy import CriticModelConfig, DividedModelConfig, PolicyModelConfig, find_indivisible
from skyrl_train.config.problems import show
from skyrl_train.config.run import RunConfig
from skyrl_train.config.supervised import DPOConfig, SupervisedConfig
from skyrl_train.dataset.demonstrations import read_answers
from skyrl_train.dataset.files import JoinedRows, check_row_count, is_other_file, local_path
from skyrl_train.dataset.rows import check_environments, read_prompt_rows
from skyrl_train.errors import ConfigError
from skyrl_train.launch.timeouts import COLLECTIVE_TIMEOUT, find_long_sync
from skyrl_train.models.weight_files import INDEX, SINGLE_FILE, find_damaged_weights, find_folder, suggest_folder
from skyrl_train.types import PromptRow

WEIGHTS = (SINGLE_FILE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors$")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

CHECKPOINT = re.compile(r"global_step_\d+$")
MAX_SUBPATH = 300
"""Maximum length in bytes of a file's path relative to a folder of the run."""


def find_missing(cfg: SkyRLConfig, *, trains: bool) -> Iterator[str]:
    """Yield a problem for each missing file, folder or function. `trains` is False for an evaluation."""
    trainer = cfg.trainer
    yield from find_unusable_folders(trainer, trains=trains)
    if trains:
        algorithm = trainer.algorithm
        names = {advantage_estimator: algorithm.advantage_estimator, policy_loss: algorithm.policy_loss_type}
        for look_up, name in names.items():
            try:
                look_up(name)
            except ConfigError as error:
                yield str(error)
    if cfg.data.custom_cls.path is None:
        yield from find_missing_data("data.train_data", cfg.data.train_data if trains else [])
        is_evaluated = not trains or trainer.eval_interval > 0
        yield from find_missing_data("data.val_data", cfg.data.val_data if is_evaluated else [])
    for key in ("data.custom_cls.path", "custom_reward_function.path"):
        if (path := value_at(cfg, key)) is not None and (fault := find_fault(Path(path))) is not None:
            yield f"{key}={show(path)}: the file {Path(path).absolute()} {fault}; use the path of a Python file"
    python = cfg.environment.skyrl_gym.python
    if python is not None and shutil.which(python) is None:
        yield (
            f"environment.skyrl_gym.python={show(python)} cannot be run: there is no such program; use the path of an "
            "interpreter that has skyrl-gym"
        )
    yield from _find_missing_models(cfg, trains=trains)
    yield from _find_model_mismatches(cfg, trains=trains)
    if trains:
        yield from _find_rank_problems(cfg)


def _find_rank_problems(cfg: SkyRLConfig) -> Iterator[str]:
    """Yield a problem if ranks cannot divide a model, or would not wait for a weight sync."""
    for role in ("policy", "critic", *(("ref",) if loads_reference(cfg) else ())):
        yield from _find_indivisible_model(cfg.trainer, role)
    # A running Ray cluster has its own environment variables. Its ranks are checked when they join.
    starts_cluster = os.environ.get("RAY_ADDRESS", "local") == "local"
    if starts_cluster and math.prod(cfg.trainer.placement.size("policy")) > 1:
        yield from find_long_sync(cfg.generator.weight_sync_timeout_seconds, COLLECTIVE_TIMEOUT)


def find_missing_for_supervised(cfg: SupervisedConfig) -> Iterator[str]:
    """Yield a problem for each missing file or folder, and for settings that the models do not allow."""
    yield from find_unusable_folders(cfg.trainer, trains=True)
    yield from find_missing_data("data.train_data", cfg.data.train_data)
    yield from find_missing_data("data.val_data", cfg.data.val_data)
    path = cfg.data.chat_template
    if path is not None:
        try:
            fault = find_fault(Path(path))
            if fault is None and not Path(path).read_text(encoding="utf-8").strip():
                fault = "is empty"
        except (OSError, UnicodeDecodeError) as error:
            fault = f"cannot be read ({error})"
        if fault is not None:
            yield f"data.chat_template={show(path)} {fault}; set it to a Jinja file, or null for the tokenizer's"
    yield from _find_missing_trained_model("trainer.policy.model", cfg.trainer.policy.model, has_tokenizer=True)
    model = cfg.trainer.policy.model.path
    if isinstance(cfg, DPOConfig) and cfg.trainer.ref.model.path != model:
        yield from _find_missing_model("trainer.ref.model.path", cfg.trainer.ref.model.path)
    yield from find_long_rows(cfg, read_context_length(model))
    for role in ("policy", "ref") if isinstance(cfg, DPOConfig) else ("policy",):
        yield from _find_indivisible_model(cfg.trainer, role)


def find_long_rows(cfg: SupervisedConfig, n_context: int | None) -> Iterator[str]:
    """Yield a problem if rows may be longer than the model's context of `n_context` tokens."""
    length, model = cfg.data.row_length(n_context), cfg.trainer.policy.model.path
    if n_context is not None and length > n_context:
        yield (
            f"data.max_length={length} is more than the context of {model}, {n_context} tokens; set "
            f"data.max_length={n_context}, or null"
        )


def read_context_length(path: str) -> int | None:
    """Return a model's context length in tokens, or None if its configuration is not on this machine or lacks it."""
    n_context = _read_model_config(path).get("max_position_embeddings")
    return n_context if isinstance(n_context, int) else None


def check_answers(cfg: SupervisedConfig) -> None:
    """Check the rows of all data files, but only a sample if training data exceeds `data.max_checked_rows` rows.

    Raises:
        DataError: a row cannot be read or has no answer to train on, or the training data does not fill a batch.
    """
    data, read_by = cfg.data, [cfg.trainer.policy.model.path]  # models that read the rows
    read_by += [cfg.trainer.ref.model.path] if isinstance(cfg, DPOConfig) else []
    find_text_model = partial(_find_local_text_model, *read_by)
    for sources, max_rows in (
        (data.train_data, data.max_checked_rows),
        (data.val_data if cfg.trainer.eval_interval > 0 else [], None),
    ):
        files = [source for source in sources if local_path(source) is not None]
        rows = JoinedRows(files)
        for _ in read_answers(rows, rows.sample(max_rows), data, find_text_model):
            pass
        if sources is data.train_data and files == sources:
            check_row_count(len(rows), cfg.trainer.train_batch_size)


def saved_folders(trainer: RunConfig, *, trains: bool) -> dict[str, str]:
    """Return the folders for a run's checkpoints and exports, by configuration key. An evaluation has none."""
    exports = {"trainer.export_path": trainer.export_path} if trainer.hf_save_interval > 0 else {}
    return {"trainer.ckpt_path": trainer.ckpt_path, **exports} if trains else {}


def find_unusable_folders(trainer: RunConfig, *, trains: bool) -> Iterator[str]:
    """Yield a problem for each folder that the run cannot write into. Creates nothing."""
    if fault := find_folder_fault(trainer.run_dir):
        yield (
            f"the run folder {show(trainer.run_dir)} cannot be written: {fault}; set trainer.output_dir, "
            "trainer.project_name and trainer.run_name, of which it consists, to a folder that you may write into"
        )
        return  # the other folders may be inside it
    for key, folder in saved_folders(trainer, trains=trains).items():
        if fault := find_folder_fault(folder):
            yield f"{key}={show(folder)} cannot be written: {fault}; set it to a folder that you may write into"


def find_folder_fault(folder: str) -> str | None:
    """Return why no files can be written under a folder (it need not exist), or None. Nothing is created."""
    if "\0" in folder:
        return "it contains a NUL character"
    try:
        os.fsencode(folder)
    except UnicodeEncodeError:
        return "it contains a lone surrogate"
    path = Path(folder).absolute()
    parent = next(ancestor for ancestor in (path, *path.parents) if os.path.lexists(ancestor))
    if not parent.is_dir():
        return f"{parent} is {'a broken link' if parent.is_symlink() else 'not a folder'}"
    missing = path.relative_to(parent).parts
    if variable := re.search(r"\$(\w+|\{\w+\})", "/".join(missing)):
        return f"the environment variable {variable[0]} is not set"
    if missing and folder.startswith("~"):
        return f"there is no user {folder.partition('/')[0].removeprefix('~')}"
    max_name, max_path = os.pathconf(parent, "PC_NAME_MAX"), os.pathconf(parent, "PC_PATH_MAX")
    if any(len(os.fsencode(name)) > max_name for name in missing):
        return f"names of files have at most {max_name} bytes"
    if len(os.fsencode(path)) + MAX_SUBPATH > max_path:
        return f"paths have at most {max_path:,} bytes, and files in the folder add up to {MAX_SUBPATH}"
    if os.statvfs(parent).f_flag & os.ST_RDONLY:
        return f"{parent} is on a read-only file system"
    if parent.resolve().parts[1:2] in (("proc",), ("sys",)):
        return f"{parent} belongs to the kernel"
    return None if os.access(parent, os.W_OK | os.X_OK) else f"{parent} is read-only for this user"


def check_data(cfg: SkyRLConfig, *, trains: bool) -> bool:
    """Check the rows of all data files. Return False if more rows come from the Hub or a custom class.

    If training data exceeds `data.max_checked_rows` rows, only a sample is checked.

    Raises:
        ConfigError: an environment does not exist, or its settings are invalid.
        DataError: a file cannot be read, a row is invalid, or the training data does not fill a batch.
    """
    if cfg.data.custom_cls.path is not None:
        return False
    parts = [(cfg.data.train_data, cfg.data.max_checked_rows)] if trains else []
    parts += [(cfg.data.val_data, None)] if not trains or cfg.trainer.eval_interval > 0 else []
    read_by = [cfg.trainer.policy.model.path]  # models that read the rows
    if trains:
        read_by += [path] if (path := cfg.trainer.critic.model.path) is not None else []
        read_by += [cfg.trainer.ref.model.path] if reads_reference(cfg.trainer.algorithm) else []
    is_local, is_complete, checked = True, True, []
    n_rows: list[int | None] = []  # of each part; None if some rows are on the Hub
    for sources, max_rows in parts:
        files = [source for source in sources if local_path(source) is not None]
        rows = JoinedRows(files)
        n_rows.append(len(rows) if files == sources else None)
        sample = rows.sample(max_rows)
        checked.append(read_prompt_rows(rows, sample, partial(_find_local_text_model, *read_by)))
        is_local = is_local and files == sources
        is_complete = is_complete and len(sample) == len(rows)
    prompts = (
        (location, PromptRow("", row.pop("prompt"), row.pop("env_class", None), row))
        for location, row in chain.from_iterable(checked)
    )
    check_environments(prompts, cfg.environment, cfg.generator.max_turns, is_complete=is_local and is_complete)
    if trains and n_rows[0] is not None:
        check_row_count(n_rows[0], cfg.trainer.train_batch_size)
    return is_local


def find_missing_data(key: str, sources: list[str]) -> Iterator[str]:
    for source in sources:
        path = local_path(source)
        if path is None and is_other_file(source):
            yield f"{key}={show(source)}: a data file must end in .parquet, .json or .jsonl; convert it"
        if path is not None and (fault := find_fault(path)) is not None:
            yield f"{key}={show(source)}: the file {path} {fault}; use a .parquet, .json or .jsonl file"


def _find_missing_models(cfg: SkyRLConfig, *, trains: bool) -> Iterator[str]:
    trainer = cfg.trainer
    yield from _find_missing_trained_model("trainer.policy.model", trainer.policy.model, has_tokenizer=True)
    if trains and trainer.critic.model.path is not None:
        yield from _find_missing_trained_model("trainer.critic.model", trainer.critic.model)
    if trains and reads_reference(trainer.algorithm) and trainer.ref.model.path != trainer.policy.model.path:
        yield from _find_missing_model("trainer.ref.model.path", trainer.ref.model.path)
    if (path := cfg.generator.reward_model.path) is None:
        return
    key, (config, weights) = f"generator.reward_model.path={show(path)}", (Path(path) / name for name in ADAPTER_FILES)
    if not config.is_file():
        yield from _find_missing_model("generator.reward_model.path", path)
        return
    if not weights.is_file():
        yield f"{key}: the folder has {config.name} and no {weights.name}; use one with an adapter of peft"
    settings = _parse_json(config)
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if isinstance(base, str):
        yield from _find_missing_model(f"{key} is an adapter of base_model_name_or_path", base)


def _find_model_mismatches(cfg: SkyRLConfig, *, trains: bool) -> Iterator[str]:
    """Yield a problem for each setting that contradicts a model's `config.json`, if that is on this machine."""
    path = cfg.trainer.policy.model.path
    policy = _read_model_config(path)
    n_context, n_tokens = policy.get("max_position_embeddings"), policy.get("vocab_size")
    sections = ("generator.sampling_params", "generator.eval_sampling_params")
    for section in sections if trains else sections[1:]:
        sampling = value_at(cfg, section)
        length = sampling.max_generate_length
        if isinstance(n_context, int) and length >= n_context:
            yield (
                f"{section}.max_generate_length={length} leaves no room for a prompt in the context of {path}, "
                f"{n_context} tokens; try {section}.max_generate_length={max(1, n_context // 2)}"
            )
        if isinstance(n_tokens, int) and (unknown := [token for token in sampling.stop_token_ids if token >= n_tokens]):
            yield (
                f"{section}.stop_token_ids has {unknown[0]}, but {path} has a vocabulary of {n_tokens} tokens; use ids "
                f"below {n_tokens}"
            )
    others = {"trainer.critic.model.path": cfg.trainer.critic.model.path}
    if reads_reference(cfg.trainer.algorithm):
        others["trainer.ref.model.path"] = cfg.trainer.ref.model.path
    for key, other in others.items() if trains else ():
        size = None if other is None else _read_model_config(other).get("vocab_size")
        if isinstance(size, int) and isinstance(n_tokens, int) and size < n_tokens:
            yield (
                f"{key}={show(other)} has a vocabulary of {size} tokens, fewer than the {n_tokens} of the policy; use "
                "a model with the policy's vocabulary"
            )


def _find_indivisible_model(trainer: RunConfig, role: str) -> Iterator[str]:
    """Yield a problem if ranks cannot divide the heads or layers of a model on this machine."""
    section = getattr(trainer, role)
    if (path := section.model.path) is None:  # there is no critic
        return
    model = _read_model_config(path)
    if isinstance(section, DividedModelConfig) and trainer.strategy_traits.is_model_parallel:
        yield from section.megatron_config.find_indivisible(model, path, f"trainer.{role}.megatron_config")
    key, n_heads = f"trainer.{role}.sequence_parallel_size", model.get("num_attention_heads")
    yield from find_indivisible(key, section.sequence_parallel_size, n_heads, f"attention heads of {path}")


def _read_model_config(path: str) -> dict[str, Any]:
    """Return the `config.json` of a model in a folder or in the Hub's cache, or {} if there is none."""
    config = None if (folder := find_folder(path)) is None else _parse_json(folder / "config.json")
    return config if isinstance(config, dict) else {}


def _find_local_text_model(*paths: str) -> str | None:
    """Return the first path of a model that reads only text, or None if all read images or are not on this machine."""
    models = {path: _read_model_config(path) for path in paths}
    return next((path for path, model in models.items() if model and model.get("vision_config") is None), None)


def _parse_json(file: Path) -> Any:
    """Return the content of a JSON file, or None if it cannot be read or parsed."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _find_missing_trained_model(
    key: str, model: PolicyModelConfig | CriticModelConfig, *, has_tokenizer: bool = False
) -> Iterator[str]:
    """Yield a problem for each missing file of a model and its adapter."""
    yield from _find_missing_model(f"{key}.path", str(model.path), has_tokenizer=has_tokenizer)
    path = model.lora.lora_path
    if path is not None and Path(path).is_dir():
        missing = [name for name in ADAPTER_FILES if not (Path(path) / name).is_file()]
        if missing:
            yield (
                f"{key}.lora.lora_path={show(path)}: the folder has no {' and no '.join(missing)}; use one with an "
                "adapter of peft"
            )
    elif path is not None and _is_local(path):
        yield (
            f"{key}.lora.lora_path={show(path)}: there is no such folder; use a local folder, or a name on the Hub "
            f"(owner/name).{suggest_folder(path)}"
        )


def _find_missing_model(key: str, path: str, *, has_tokenizer: bool = False) -> Iterator[str]:
    folder = Path(path)
    if folder.is_file():
        yield f"{key}={show(path)} is a file; use the folder that contains it"
    elif folder.is_dir():
        names = {entry.name for entry in folder.iterdir()}
        missing = [] if "config.json" in names else ["config.json"]
        has_shards = any(SHARD.match(name) for name in names)
        missing += [] if names & set(WEIGHTS) else [INDEX if has_shards else SINGLE_FILE]
        missing += [] if not has_tokenizer or names & set(TOKENIZERS) else ["tokenizer.json"]
        checkpoint = folder / "ckpts" if "ckpts" in names else folder
        steps = ("policy", "global_step_*/policy", "export/global_step_*/policy")
        exports = [config.parent for step in steps for config in folder.glob(f"{step}/config.json")]
        if "config.json" not in names and exports:
            newest = max(exports, key=lambda export: export.stat().st_mtime)
            yield f"{key}={show(path)} contains exported models; use {key}={show(str(newest))}"
        elif "config.json" not in names and ("ckpts" in names or CHECKPOINT.match(folder.name)):
            yield (
                f"{key}={show(path)} is the folder of a run, not of a model; make a model of its checkpoint: "
                f"skyrl merge checkpoint {checkpoint} <new folder>"
            )
        elif missing:
            files = " and no ".join(missing)
            yield f"{key}={show(path)}: the folder has no {files}; save the model and its tokenizer there"
        elif not isinstance(config := _parse_json(folder / "config.json"), dict):
            fault = "cannot be read" if config is None else f"is a {type(config).__name__}, not an object"
            yield f"{key}={show(path)}: {path}/config.json {fault}; save the model with save_pretrained"
        elif (damage := find_damaged_weights(folder)) is not None:
            yield f"{key}={show(path)}: {damage}"
    elif _is_local(path):
        hint = suggest_folder(path)
        yield f"{key}={show(path)}: there is no such folder; use one, or a name on the Hub (owner/name).{hint}"


def _is_local(path: str) -> bool:
    """Return True if `path` is meant as a folder (that does not exist), and False if it may be a name on the Hub.

    `Qwen/Qwen3-8B` may be a name on the Hub, even next to a folder Qwen/Qwen3-4B, unless Qwen itself is a model's
    folder.
    """
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        return True
    if "/" in path:
        return (Path(path).parent / "config.json").is_file()
    return bool(suggest_folder(path)) and not _read_model_config(path)
