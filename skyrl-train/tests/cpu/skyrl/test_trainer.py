"""Trainers with the signatures of SkyRL's new layout."""

from typing import Any

from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.trainer import RayPPOTrainer

from skyrl_train import fully_async_trainer

OUTPUT: Any = {"rewards": [1.0, None], "loss_masks": [[1, 1, 0], [1]]}
PARTS: Any = [None] * 7


class Punishing(FullyAsyncRayPPOTrainer):
    def postprocess_generator_output(self, generator_output: Any, uids: list[str], **views: Any) -> Any:
        generator_output = {**generator_output, "rewards": [0.0, 0.0]}
        return super().postprocess_generator_output(generator_output, uids, **views)


def test_the_hook_returns_rollouts_and_uids() -> None:
    output, uids = RayPPOTrainer(*PARTS).postprocess_generator_output(OUTPUT, ["a", "b"])
    assert (output["rewards"], uids) == ([[0.0, 1.0, 0.0], [0.0]], ["a", "b"])
    views: Any = {"metrics_generator_output": OUTPUT, "metrics_uids": ["a", "b"]}
    output, uids = Punishing(*PARTS).postprocess_generator_output(OUTPUT, ["a", "b"], **views)
    assert output["rewards"] == [[0.0, 0.0, 0.0], [0.0]]


def test_only_an_override_of_a_script_counts() -> None:
    trainers = (RayPPOTrainer, FullyAsyncRayPPOTrainer, Punishing)
    assert [cls(*PARTS).postprocesses for cls in trainers] == [False, False, True]
    assert issubclass(Punishing, fully_async_trainer.FullyAsyncRayPPOTrainer), "the experiment recognizes it by this"
