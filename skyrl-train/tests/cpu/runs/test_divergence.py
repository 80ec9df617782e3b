"""A run whose weights diverge ends with its reason, and keeps what it saved before."""

from pathlib import Path

import pytest
import torch
from train_kit.runs import expect_error, run_of, train, train_with

from skyrl_train.errors import DivergenceError
from skyrl_train.trainer import Step, Trainer
from skyrl_train.types import TrainingBatch

EXPORTING = "trainer.hf_save_interval=1"
UNSAVED = "trainer.ckpt_interval=-1"


@pytest.mark.parametrize(
    ("stage", "step", "overrides"),
    [
        ("update", 2, [EXPORTING]),  # the last step
        ("update", 2, [EXPORTING, UNSAVED]),
        ("update", 1, ["trainer.max_ckpts_to_keep=1"]),
        ("sync_weights", 1, []),  # found before the checkpoint
        ("sync_weights", 1, [UNSAVED]),  # found when the rollouts of the next step fail
    ],
)
def test_weights_that_become_nan_end_the_run_and_are_not_saved(
    catch_run: list[str], stage: str, step: int, overrides: list[str]
) -> None:
    class Diverging(Trainer):
        async def update(self, current: Step, batch: TrainingBatch) -> None:
            self.harm("update", current)
            await super().update(current, batch)

        async def sync_weights(self, current: Step) -> None:
            await super().sync_weights(current)
            self.harm("sync_weights", current)

        def harm(self, name: str, current: Step) -> None:
            if (name, current.number) == (stage, step):
                (rank,) = self.learner.policy._ranks
                with torch.no_grad():
                    for parameter in rank.host.workers["policy"].module.parameters():  # type: ignore[attr-defined]
                        parameter.fill_(torch.nan)

    command = [*catch_run, "trainer.ckpt_interval=1", "trainer.eval_interval=-1", *overrides]
    is_saved = step == 2 and UNSAVED not in overrides
    kept = "the checkpoint of step 1 is kept" if is_saved else "there is no earlier checkpoint"
    with pytest.raises(DivergenceError) as error:
        train_with(*command, trainer=Diverging)
    assert str(error.value).startswith(
        f"in step {step}, the policy has diverged with trainer.policy.optimizer_config.lr=1e-06: its weights are NaN "
        f"or infinite; {kept}. The same command would diverge again: start a new run"
    )
    run = run_of(command)
    assert run.checkpoints.steps() == ([1] if is_saved else [])
    assert list(run.folder.glob("ckpts/.global_step_*")) == []
    exports = [path.name for path in run.folder.glob("export/global_step_*")]
    assert exports == (["global_step_1"] if EXPORTING in overrides else [])
    if is_saved:
        train(*command)
        assert run.checkpoints.steps()[-1] == 2, "without the fault, the run resumes from the finite checkpoint"


def test_a_learning_rate_of_1000_ends_the_run_in_its_first_step_with_its_own_status(
    catch_run: list[str], tmp_path: Path
) -> None:
    optimizer = [f"trainer.policy.optimizer_config.{setting}" for setting in ("lr=1e3", "weight_decay=0")]
    message = expect_error(*catch_run, *optimizer, "trainer.ckpt_interval=1", status=DivergenceError.exit_status)
    assert message.count("diverged with") == 1
    assert (
        "error: in step 1, the policy has diverged with trainer.policy.optimizer_config.lr=1000: the gradient of"
        in message
    )
    assert [path.name for path in (tmp_path / "skyrl/test_run/ckpts").iterdir()] == [".lock"]
