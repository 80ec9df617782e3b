"""Checks of what a run will look up, before PyTorch is imported and before the Hub is asked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from skyrl_train.algorithms.registry import advantage_estimator, policy_loss
from skyrl_train.algorithms.rules import reads_reference
from skyrl_train.checkpoint import find_folder_fault
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.problems import show
from skyrl_train.config.root import DATA_SUFFIXES
from skyrl_train.errors import ConfigError

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def find_missing(cfg: SkyRLConfig, *, trains: bool) -> Iterator[str]:
    """Yield a sentence for each file, folder or function that a training run, or else an evaluation, would not find."""
    trainer = cfg.trainer
    yield from find_unusable_folders(cfg)
    if trains:
        for look_up, name in (
            (advantage_estimator, trainer.algorithm.advantage_estimator),
            (policy_loss, trainer.algorithm.policy_loss_type),
        ):
            try:
                look_up(name)
            except ConfigError as error:
                yield str(error)
        yield from _missing_data("data.train_data", cfg.data.train_data)
    if not trains or trainer.eval_interval > 0:
        yield from _missing_data("data.val_data", cfg.data.val_data)
    yield from _missing_model("trainer.policy.model.path", trainer.policy.model.path, has_tokenizer=True)
    if trains and trainer.critic.model.path is not None:
        yield from _missing_model("trainer.critic.model.path", trainer.critic.model.path)
    if trains and reads_reference(trainer.algorithm) and trainer.ref.model.path != trainer.policy.model.path:
        yield from _missing_model("trainer.ref.model.path", trainer.ref.model.path)


def find_unusable_folders(cfg: SkyRLConfig) -> Iterator[str]:
    """Yield a sentence for each folder that the run would write into and cannot. Creates nothing."""
    trainer = cfg.trainer
    if fault := find_folder_fault(trainer.run_dir):
        yield (
            f"the run folder {show(trainer.run_dir)} cannot be written: {fault}; set trainer.output_dir, "
            "trainer.project_name and trainer.run_name, of which it consists, to a folder that you may write into"
        )
        return  # the other folders may be below it
    folders = {"trainer.ckpt_path": trainer.ckpt_path}
    if trainer.hf_save_interval > 0:
        folders["trainer.export_path"] = trainer.export_path
    for key, folder in folders.items():
        if fault := find_folder_fault(folder):
            yield f"{key}={show(folder)} cannot be written: {fault}; set it to a folder that you may write into"


def _missing_data(key: str, sources: list[str]) -> Iterator[str]:
    for source in sources:
        path = Path(os.path.expandvars(source)).expanduser()
        if path.suffix in DATA_SUFFIXES and not path.is_file():
            fault = "is a folder" if path.is_dir() else "does not exist"
            yield f"{key}={show(source)}: the file {path} {fault}; use a .parquet, .json or .jsonl file"


def _missing_model(key: str, path: str, *, has_tokenizer: bool = False) -> Iterator[str]:
    folder = Path(path)
    if folder.is_file():
        yield f"{key}={show(path)} is a file; use the folder that contains it"
    elif folder.is_dir():
        names = {entry.name for entry in folder.iterdir()}
        missing = [] if "config.json" in names else ["config.json"]
        missing += [] if names & set(WEIGHTS) else ["model.safetensors"]
        missing += [] if not has_tokenizer or names & set(TOKENIZERS) else ["tokenizer.json"]
        if missing:
            files = " and no ".join(missing)
            yield f"{key}={show(path)}: the folder has no {files}; save the model and its tokenizer there"
    elif path.startswith((".", "/", "~")) or path.count("/") > 1:
        yield f"{key}={show(path)}: there is no such folder; use a local folder, or a name on the Hub (owner/name)"
