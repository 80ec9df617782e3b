"""The prompts of a run, as its generator renders them. Importing this module imports PyTorch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from skyrl_gym.envs.entry_point import load_attribute
from skyrl_gym.error import InvalidSpec
from skyrl_train.callbacks import Callback, Curriculum, CurriculumStep
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.files import local_path
from skyrl_train.dataset.mixture import MixedPrompts
from skyrl_train.dataset.order import PromptOrder
from skyrl_train.dataset.prompts import CustomDataset, PromptDataset
from skyrl_train.dataset.rows import check_environments
from skyrl_train.errors import ConfigError
from skyrl_train.generators.chat_template import load_chat_template, read_chat_template
from skyrl_train.models.loading import load_tokenizer

Split = Literal["train", "validation"]


def load_policy_tokenizer(cfg: SkyRLConfig) -> PreTrainedTokenizerBase:
    """Load the policy's tokenizer. Raise ConfigError if there is none, or if it has no chat template.

    `generator.engine_init_kwargs.chat_template` replaces its template. `generator.chat_template` is the default.
    """
    generator, path = cfg.generator, cfg.trainer.policy.model.path
    key = "generator.engine_init_kwargs.chat_template"
    if (file := generator.engine_init_kwargs.get("chat_template")) is not None:
        template = read_chat_template(str(file), key)
        return load_tokenizer(path, chat_template=template, template_key=key, replaces_template=True)
    if (fallback := load_chat_template(generator.chat_template)) is not None:
        return load_tokenizer(path, chat_template=fallback)
    return load_tokenizer(path, template_key=key)


def open_prompts(cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, split: Split) -> PromptDataset:
    """Open the prompts of a split, rendered as the generator does. Prompts that are too long are dropped.

    Raises:
        ConfigError: the custom dataset class cannot be constructed.
        DataError: a source or row cannot be used, or no prompt is short enough.
    """
    data = cfg.data
    if data.custom_cls.path is not None:
        return CustomDataset(cfg, tokenizer, split)
    return PromptDataset(
        data.train_data if split == "train" else data.val_data,
        tokenizer,
        cfg.trainer.max_prompt_length,
        max_checked_rows=data.max_checked_rows if split == "train" else None,
        chat_template=load_chat_template(cfg.generator.chat_template),
        chat_template_kwargs=cfg.generator.chat_template_kwargs,
    )


def open_eval_prompts(cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase) -> PromptDataset | None:
    """Open the prompts to evaluate on, or return None without validation data."""
    has_data = cfg.data.custom_cls.path is not None or cfg.data.val_data
    return open_prompts(cfg, tokenizer, "validation") if has_data else None


def curriculum_callbacks(cfg: SkyRLConfig, prompts: PromptOrder) -> list[Callback]:
    """Return the callback of `data.mixture.curriculum`, if it is set. ConfigError if it names no function."""
    name = cfg.data.mixture.curriculum
    if name is None or not isinstance(prompts, MixedPrompts):
        return []
    try:
        curriculum: Curriculum = load_attribute(name)
    except (ImportError, InvalidSpec) as error:
        raise ConfigError(f"data.mixture.curriculum={name}: {error}") from error
    if not callable(curriculum):
        raise ConfigError(f"data.mixture.curriculum={name} is {curriculum!r}; it must be a function")
    return [CurriculumStep(prompts, curriculum)]


def check_rows(cfg: SkyRLConfig, datasets: Sequence[PromptDataset]) -> None:
    """Check that the environments accept the rows. Lazy datasets check only a sample here.

    Raise ConfigError if an environment does not exist or rejects its settings, and DataError if it rejects a row.
    """
    rows = (row for dataset in datasets for row in dataset.checked_rows())
    is_complete = all(dataset.is_checked for dataset in datasets)
    check_environments(rows, cfg.environment, cfg.generator.max_turns, is_complete=is_complete)


def check_prompts(cfg: SkyRLConfig) -> int | None:
    """Render the prompts of the data files, or check the rows of a custom class, if the tokenizer is on this machine.

    Return the tokens of the longest training prompt, or None if they are unknown.

    Raises:
        ConfigError: the tokenizer cannot be loaded or has no chat template, or the custom class rejects its options.
        DataError: the chat template rejects a prompt, no prompt is short enough, or a row cannot be used.
    """
    data = cfg.data
    if not Path(cfg.trainer.policy.model.path).is_dir():
        return None
    tokenizer = load_policy_tokenizer(cfg)
    splits: dict[Split, list[str]] = {"train": data.train_data}
    if cfg.trainer.eval_interval > 0:
        splits["validation"] = data.val_data
    if data.custom_cls.path is not None:
        check_rows(cfg, [open_prompts(cfg, tokenizer, split) for split in splits])
        return None
    longest = None
    for split, sources in splits.items():
        if sources and all(local_path(source) is not None for source in sources):
            dataset = open_prompts(cfg, tokenizer, split)
            longest = dataset.longest_prompt if split == "train" else longest
    return longest
