"""Supervised and preference training here and in TRL: equal models, rows and optimizers give equal losses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from train_kit.datasets import write_rows
from train_kit.runs import read_lines
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from skyrl_train.config.cli import parse
from skyrl_train.config.supervised import DPO, SFT
from skyrl_train.dataset.order import ShuffledPrompts
from skyrl_train.dataset.supervised import ConversationEncoder, SupervisedDataset
from skyrl_train.entrypoints.preferences import DPOExp
from skyrl_train.entrypoints.sft import SFTExp
from skyrl_train.types import Segment

BATCH_SIZE, LR, BETA = 4, 1e-3, 0.2


class InOrder:
    """A trainer of TRL without shuffling."""

    train_dataset: Dataset

    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class SFTInOrder(InOrder, SFTTrainer):
    pass


class DPOInOrder(InOrder, DPOTrainer):
    pass


def train_here(
    kind: type[Any], schema: Any, n_steps: int, path: str, model: Path, folder: Path, *overrides: str
) -> tuple[list[dict[str, float]], list[tuple[list[Segment], ...]], PreTrainedTokenizerBase]:
    """Return the metrics of each step, the rows in the order of training, and the tokenizer."""
    cfg = parse(
        [
            f"data.train_data='{path}'",
            "data.max_length=256",
            f"trainer.policy.model.path='{model}'",
            f"trainer.output_dir='{folder}'",
            "trainer.run_name=run",
            f"trainer.train_batch_size={BATCH_SIZE}",
            "trainer.micro_train_batch_size_per_gpu=3",
            f"trainer.policy.optimizer_config.lr={LR}",
            "trainer.ckpt_interval=-1",
            "trainer.logger=jsonl",
            *overrides,
        ],
        schema,
    )
    kind(cfg).run()
    tokenizer = AutoTokenizer.from_pretrained(model)
    dataset = SupervisedDataset([path], ConversationEncoder(tokenizer), cfg.data)
    order = ShuffledPrompts(dataset, BATCH_SIZE, cfg.trainer.seed)
    rows = [drawn.row for _ in range(n_steps) for drawn in order.next_batch()]
    return read_lines(folder / "skyrl/run/metrics.jsonl"), rows, tokenizer


def train_there(
    kind: type[Any],
    config: Callable[..., Any],
    examples: list[dict[str, Any]],
    model: Path,
    folder: Path,
    **settings: Any,
) -> list[dict[str, float]]:
    """Return what TRL logs at each step."""
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=config(
            output_dir=str(folder),
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=len(examples) // BATCH_SIZE,
            learning_rate=LR,
            weight_decay=0.0,
            lr_scheduler_type="cosine",
            max_grad_norm=1.0,
            max_length=256,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            dataloader_pin_memory=False,
            **settings,
        ),
        train_dataset=Dataset.from_list(examples),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def test_supervised_losses_agree(tiny_model_path: Path, tmp_path: Path) -> None:
    n_steps = 20
    rows = [{"prompt": f"1 22 {n}", "response": "one two three " * (1 + n % 5) + str(n)} for n in range(n_steps * 4)]
    weights = [
        "trainer.policy.optimizer_config.weight_decay=0",  # TRL decays no norms, and we decay all weights
        "trainer.policy.optimizer_config.warmup_ratio=0.1",
    ]
    ours, drawn, _ = train_here(
        SFTExp, SFT, n_steps, write_rows(tmp_path, rows), tiny_model_path, tmp_path / "ours", *weights
    )
    examples = [
        {"input_ids": segment.token_ids, "completion_mask": [0] * segment.n_prompt + segment.loss_mask}
        for ((segment,),) in drawn
    ]
    options = {"adam_beta2": 0.98, "warmup_steps": n_steps // 10, "completion_only_loss": True}
    theirs = train_there(SFTInOrder, SFTConfig, examples, tiny_model_path, tmp_path / "theirs", **options)
    losses = [row["train/loss"] for row in ours]
    assert losses[0] > 2 * losses[-1]
    assert losses == pytest.approx([row["loss"] for row in theirs], abs=1e-4)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_preference_losses_agree(loss_type: str, tiny_model_path: Path, tmp_path: Path) -> None:
    n_steps = 10
    rows = [
        {"prompt": f"1 22 {n}", "chosen": "one two " * (1 + n % 5) + str(n), "rejected": f"three {n} " * (1 + n % 3)}
        for n in range(n_steps * BATCH_SIZE)
    ]
    loss = f"trainer.dpo={{beta:{BETA},loss_type:{loss_type}}}"
    ours, drawn, tokenizer = train_here(
        DPOExp, DPO, n_steps, write_rows(tmp_path, rows), tiny_model_path, tmp_path / "ours", loss
    )
    examples = []
    for (chosen,), (rejected,) in drawn:
        texts = [tokenizer.decode(s.response_ids).removesuffix(tokenizer.eos_token) for s in (chosen, rejected)]
        examples.append({"prompt": tokenizer.decode(chosen.prompt_ids), "chosen": texts[0], "rejected": texts[1]})
    options = {"beta": BETA, "loss_type": loss_type, "disable_dropout": True}
    theirs = train_there(DPOInOrder, DPOConfig, examples, tiny_model_path, tmp_path / "theirs", **options)
    assert ours[0]["train/loss"] > 1.2 * ours[-1]["train/loss"]
    names = {"train/loss": "loss", "train/margin": "rewards/margins", "train/chosen_reward": "rewards/chosen"}
    for our_name, their_name in names.items():
        expected = [row[their_name] for row in theirs]
        assert [row[our_name] for row in ours] == pytest.approx(expected, rel=1e-4, abs=1e-4), our_name
