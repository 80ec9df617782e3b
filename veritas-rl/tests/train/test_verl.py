"""verl's own command lines, typed in the folder `train`."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from veritas_kit.recipes import MODELS, Recipes

TORCHRUN = "python -m torch.distributed.run --nnodes=1 --nproc_per_node=2 -m"
PPO = "algorithm.adv_estimator=grpo actor_rollout_ref.actor.ppo_mini_batch_size=32"


@pytest.mark.parametrize(
    ("command", "option", "plan"),
    [
        (f"python -m verl.trainer.main_ppo {PPO}", "actor_rollout_ref.model.path", "32 prompts"),
        (f"{TORCHRUN} verl.trainer.fsdp_sft_trainer", "model.partial_pretrain", "per process"),
    ],
)
def test_programs_run_by_their_modules(command: str, option: str, plan: str, recipes: Recipes) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": "1 + 2?"}],
            "response": "3",
            "reward_spec": {"ground_truth": "3"},
            "env_class": "gsm8k",
        }
    ]
    pq.write_table(pa.Table.from_pylist(rows * 64), recipes.root / "train/rows.parquet")
    data = "data.train_files=rows.parquet data.val_files=rows.parquet data.train_batch_size=32"
    result = recipes.shell(
        ["bash", "-c", f"cd train && {command} {data} {option}=models/{MODELS[0]} --dry-run"], OMP_NUM_THREADS="1"
    )
    assert result.returncode == 0, result.stderr
    assert plan in result.stdout
