"""Tiny models of the architectures in `docs/reference/models.md` train as the page says."""

from pathlib import Path

import pytest
from train_kit.architectures import ARCHITECTURES, each_architecture, stated, tiny_config
from train_kit.datasets import write_answers, write_prompts
from train_kit.models import create_model
from train_kit.runs import small_run, supervised_run, train
from transformers import PreTrainedTokenizerBase

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) / 10\n"


def test_the_page_lists_the_architectures_that_are_tested() -> None:
    assert list(stated()) == list(ARCHITECTURES)


@each_architecture()
def test_an_architecture_trains(
    name: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    """The log-probs of rollouts are the trainer's, with all weights and with an adapter, before and after an update."""
    cells = stated()[name]
    model = tmp_path / "model"
    create_model(tiny_config(name, tiny_tokenizer)).save_pretrained(model)
    tiny_tokenizer.save_pretrained(model)
    (tmp_path / "reward.py").write_text(REWARD)
    settings = [
        f"custom_reward_function.path={tmp_path}/reward.py",
        "environment.env_class=reward_function",
        "generator.n_samples_per_prompt=4",
        "generator.sampling_params.max_generate_length=12",
        "trainer.max_training_steps=2",
        "trainer.epochs=2",
    ]
    data = write_prompts(tmp_path / "rows.jsonl", 4, reward_spec={"ground_truth": "1"})
    adapter = ["trainer.policy.model.lora.rank=4"]
    if cells["LoRA"] == "attention":
        adapter.append("trainer.policy.model.lora.target_modules=[o_proj]")
    for run_name, overrides in {"whole": [], "lora": adapter}.items():
        run = train(*small_run(tmp_path, *settings, *overrides, model=model, data=data, name=run_name))
        for step in run.metrics[1:]:
            assert step["policy/rollout_train_logprobs_abs_diff_mean"] < 2e-6
            assert step["policy/grad_norm"] > 0
    assert ("padded instead of packed" in caplog.text) == (cells["engine"] == "padded")
    assert ("computes every row separately" in caplog.text) == (cells["prefixes"] == "per row")
    sft = ["trainer.max_training_steps=2", "trainer.ckpt_interval=-1", "trainer.hf_save_interval=-1"]
    run = train(*supervised_run(tmp_path, *sft, model=model, data=write_answers(tmp_path), name="sft"), command="sft")
    first, last = (step["train/loss"] for step in run.metrics if "train/loss" in step)
    assert last < first
