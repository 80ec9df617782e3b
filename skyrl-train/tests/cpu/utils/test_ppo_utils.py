"""Names and calling conventions of SkyRL that scripts rely on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from train_kit.processes import TRAIN_FOLDER, python

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.utils import ppo_utils
from skyrl_train.utils.ppo_utils import (
    compute_grpo_outcome_advantage,
    ppo_policy_loss,
    reduce_loss,
)

SCRIPT = """
import hydra, torch
from omegaconf import DictConfig
from skyrl_gym.envs import register
from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg
from skyrl_train.utils.ppo_utils import (
    AdvantageEstimatorRegistry, PolicyLossRegistry, compute_grpo_outcome_advantage, reduce_loss, register_policy_loss,
)


def compute_simple_baseline(token_level_rewards, response_mask, index, **kwargs):
    with torch.no_grad():
        advantages, _ = compute_grpo_outcome_advantage(
            token_level_rewards=token_level_rewards, response_mask=response_mask, index=index, grpo_norm_by_std=False
        )
        return advantages, advantages


AdvantageEstimatorRegistry.register("simple_baseline", compute_simple_baseline)


@register_policy_loss("simple_reinforce")
def compute_reinforce(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    loss = -log_probs * advantages * config.custom["scale"]
    return reduce_loss(loss, loss_mask, config.loss_reduction, config.max_seq_len), 0.0


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)
    register(id="catch", entry_point="examples.catch.env:CatchEnv")
    assert "simple_reinforce" in PolicyLossRegistry.list_available()
    BasePPOExp(cfg).run()


if __name__ == "__main__":
    main()
"""


def test_a_script_with_a_custom_estimator_and_scalar_loss_trains(tiny_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    row = {
        "prompt": [{"role": "user", "content": "State: …"}],
        "env_class": "catch",
        "extra_info": {"ball_x": 3, "paddle_x": 2},
    }
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    finished = subprocess.run(
        [
            *(python(), str(tmp_path / "script.py")),
            f"data.train_data=['{tmp_path}/rows.jsonl']",
            f"trainer.policy.model.path='{tiny_model_path}'",
            f"trainer.output_dir='{tmp_path}'",
            "trainer.run_name=test_run",
            "trainer.algorithm.advantage_estimator=simple_baseline",
            "trainer.algorithm.policy_loss_type=simple_reinforce",
            "+trainer.algorithm.custom.scale=2.0",
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=2",
            "trainer.micro_train_batch_size_per_gpu=3",
            "trainer.eval_interval=-1",
            "trainer.ckpt_interval=-1",
            "trainer.logger=jsonl",
            "generator.max_turns=5",
            "generator.sampling_params.max_generate_length=2",
        ],
        cwd=TRAIN_FOLDER,
        env={"PYTHONPATH": str(TRAIN_FOLDER), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    last = json.loads((tmp_path / "skyrl/test_run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["policy/grad_norm"] > 0
    assert last["policy/ppo_clip_ratio"] == 0.0


def test_advantages_of_a_registered_estimator_and_their_normalization() -> None:
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.ones(2, 2)
    inputs = {"token_level_rewards": rewards, "response_mask": mask, "index": ["a", "a"]}
    expected = compute_grpo_outcome_advantage(**inputs, grpo_norm_by_std=False)
    config = AlgorithmConfig(grpo_norm_by_std=False)
    computed = ppo_utils.compute_advantages_and_returns(**inputs, adv_estimator="grpo", config=config, values=None)
    torch.testing.assert_close(computed, expected)
    batch = ppo_utils.normalize_advantages_dict({"advantages": computed[0], "loss_mask": mask})
    torch.testing.assert_close(batch["advantages"], torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))


HERE = {"compute_advantages_and_returns", "normalize_advantages_dict"}


@pytest.mark.parametrize("name", sorted(set(ppo_utils.__all__) - HERE))
def test_every_other_name_comes_from_algorithms(name: str) -> None:
    value = getattr(ppo_utils, name)
    module = getattr(value, "__module__", type(value).__module__)
    assert module.startswith("skyrl_train.algorithms")


def test_a_loss_can_be_called_without_a_mask_and_reduced() -> None:
    log_probs, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -2.0]])
    loss, metrics = ppo_policy_loss(log_probs, old, torch.tensor([[1.0, 3.0]]), AlgorithmConfig())
    assert reduce_loss(loss, None, "token_mean").item() == -2.0
    assert metrics["ppo_clip_ratio"].sum() == 0
