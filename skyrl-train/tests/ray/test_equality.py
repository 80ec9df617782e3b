"""Five steps on one rank and on two FSDP2 ranks have the losses and the weights of one process, for every algorithm."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from ray.cluster_utils import Cluster
from train_kit.runs import Run, assert_close_runs

from skyrl_train.algorithms.registry import POLICY_LOSSES
from skyrl_train.config.algorithm import LossReduction

pytestmark = pytest.mark.timeout(1200)

CRITIC = ["trainer.algorithm.advantage_estimator=gae"]
LORA = ["trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.merge_on_export=true"]
CRITIC_LORA = ["trainer.critic.model.lora.rank=4", "trainer.critic.model.lora.merge_on_export=true"]
WHOLE_BATCH = sorted(name for name, (_, traits) in POLICY_LOSSES.entries.items() if traits.whole_batch)

RUNS: dict[str, list[str]] = {
    "ppo": CRITIC,
    "lora": LORA,
    "lora-critic": [*CRITIC, *LORA, *CRITIC_LORA],
    **{f"reduction-{name}": [f"trainer.algorithm.loss_reduction={name}"] for name in get_args(LossReduction)},
    **{f"loss-{name}": [f"trainer.algorithm.policy_loss_type={name}"] for name in WHOLE_BATCH},
}


@pytest.mark.parametrize("name", RUNS)
def test_ranks_train_like_one_process(
    name: str, start_cluster: Callable[..., Cluster], train: Callable[..., Run], tiny_model_path: Path
) -> None:
    start_cluster(2)
    critic = [f"trainer.critic.model.path={tiny_model_path}"] if "gae" in " ".join(RUNS[name]) else []
    settings = [*RUNS[name], *critic, "trainer.algorithm.max_seq_len=40", "trainer.update_epochs_per_batch=2"]
    inline = train("inline", *settings)
    for n_ranks in (1, 2):
        placement = ["trainer.placement.launcher=ray", f"trainer.placement.policy_num_gpus_per_node={n_ranks}"]
        assert_close_runs(train(f"ranks-{n_ranks}", *settings, *placement), inline)


def test_ranks_that_divide_tokens_train_like_one_process(
    start_cluster: Callable[..., Cluster], train: Callable[..., Run], tiny_model_path: Path
) -> None:
    start_cluster(2)
    settings = [*CRITIC, f"trainer.critic.model.path={tiny_model_path}", "trainer.update_epochs_per_batch=2"]
    placement = ["trainer.placement.launcher=ray", "trainer.placement.policy_num_gpus_per_node=2"]
    division = [f"trainer.{role}.sequence_parallel_size=2" for role in ("policy", "critic", "ref")]
    assert_close_runs(train("ranks", *settings, *placement, *division), train("inline", *settings))
