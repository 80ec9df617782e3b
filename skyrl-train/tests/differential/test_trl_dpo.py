"""Direct preference optimization here and in TRL: the same model, pairs, order and optimizer give the same losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from skyrl_train.config.cli import parse
from skyrl_train.config.preferences import DPO
from skyrl_train.dataset.order import ShuffledPrompts
from skyrl_train.dataset.supervised import ConversationEncoder, SupervisedDataset
from skyrl_train.entrypoints.preferences import DPOExp

N_STEPS, BATCH_SIZE, LR, BETA = 10, 4, 1e-3, 0.2
NAMES = {"train/loss": "loss", "train/margin": "rewards/margins", "train/chosen_reward": "rewards/chosen"}


class InOrder(DPOTrainer):
    """TRL's trainer without shuffling."""

    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_the_losses_of_ten_steps_agree(loss_type: str, tiny_model_path: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"1 22 {n}", "chosen": "one two " * (1 + n % 5) + str(n), "rejected": f"three {n} " * (1 + n % 3)}
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
            f"trainer.dpo={{beta:{BETA},loss_type:{loss_type}}}",
            "trainer.ckpt_interval=-1",
            "trainer.logger=jsonl",
        ],
        DPO,
    )
    DPOExp(cfg).run()
    ours = [json.loads(line) for line in (tmp_path / "ours/skyrl/run/metrics.jsonl").read_text().splitlines()]

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    order = ShuffledPrompts(
        SupervisedDataset([str(path)], ConversationEncoder(tokenizer), cfg.data), BATCH_SIZE, cfg.trainer.seed
    )
    examples = []
    for _ in range(N_STEPS):
        for drawn in order.next_batch():
            (chosen,), (rejected,) = drawn.row
            texts = [tokenizer.decode(s.response_ids).removesuffix(tokenizer.eos_token) for s in (chosen, rejected)]
            examples.append({"prompt": tokenizer.decode(chosen.prompt_ids), "chosen": texts[0], "rejected": texts[1]})
    trl = InOrder(
        model=AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32),
        args=DPOConfig(
            output_dir=str(tmp_path / "theirs"),
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=N_STEPS,
            learning_rate=LR,
            weight_decay=0.0,
            lr_scheduler_type="cosine",
            max_grad_norm=1.0,
            max_length=256,
            beta=BETA,
            loss_type=loss_type,
            bf16=False,
            disable_dropout=True,
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
    theirs = [row for row in trl.state.log_history if "loss" in row]
    assert ours[0]["train/loss"] > 1.2 * ours[-1]["train/loss"]
    for our_name, their_name in NAMES.items():
        expected = [row[their_name] for row in theirs]
        assert [row[our_name] for row in ours] == pytest.approx(expected, rel=1e-4, abs=1e-4), our_name
