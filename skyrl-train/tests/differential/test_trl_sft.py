"""Supervised fine-tuning here and in TRL: the same model, rows, order and optimizer give the same losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from skyrl_train.config.cli import parse
from skyrl_train.config.sft import SFT
from skyrl_train.dataset.order import ShuffledPrompts
from skyrl_train.dataset.supervised import ConversationEncoder, SupervisedDataset
from skyrl_train.entrypoints.sft import SFTExp

N_STEPS, BATCH_SIZE, LR = 20, 4, 1e-3


class InOrder(SFTTrainer):
    """TRL's trainer without shuffling."""

    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def test_the_losses_of_twenty_steps_agree(tiny_model_path: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"1 22 {n}", "response": "one two three " * (1 + n % 5) + str(n)}
        for n in range(N_STEPS * BATCH_SIZE)
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = parse(
        [
            f"data.train_data='{path}'",
            "data.max_length=256",
            f"trainer.policy.model.path='{tiny_model_path}'",
            f"trainer.output_dir='{tmp_path}/ours'",
            "trainer.run_name=run",
            f"trainer.train_batch_size={BATCH_SIZE}",
            "trainer.micro_train_batch_size_per_gpu=3",
            f"trainer.policy.optimizer_config.lr={LR}",
            "trainer.policy.optimizer_config.weight_decay=0",  # TRL decays no norms, and we decay all weights
            "trainer.policy.optimizer_config.warmup_ratio=0.1",
            "trainer.ckpt_interval=-1",
            "trainer.logger=jsonl",
        ],
        SFT,
    )
    SFTExp(cfg).run()
    metrics = [json.loads(line) for line in (tmp_path / "ours/skyrl/run/metrics.jsonl").read_text().splitlines()]
    ours = [row["train/loss"] for row in metrics]

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    order = ShuffledPrompts(
        SupervisedDataset([str(path)], ConversationEncoder(tokenizer), cfg.data), BATCH_SIZE, cfg.trainer.seed
    )
    examples = []
    for _ in range(N_STEPS):
        for drawn in order.next_batch():
            ((segment,),) = drawn.row
            mask = [0] * segment.n_prompt + segment.loss_mask
            examples.append({"input_ids": segment.token_ids, "completion_mask": mask})
    trl = InOrder(
        model=AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32),
        args=SFTConfig(
            output_dir=str(tmp_path / "theirs"),
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=N_STEPS,
            learning_rate=LR,
            adam_beta2=0.98,
            weight_decay=0.0,
            lr_scheduler_type="cosine",
            warmup_steps=int(0.1 * N_STEPS),
            max_grad_norm=1.0,
            max_length=256,
            completion_only_loss=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer,
    )
    trl.train()
    theirs = [row["loss"] for row in trl.state.log_history if "loss" in row]
    assert ours[0] > 2 * ours[-1]
    assert ours == pytest.approx(theirs, abs=1e-4)
