"""Trainers that are written for SkyRL: subclasses of `RayPPOTrainer` that override its hooks."""

import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.datasets import prompt_row
from train_kit.models import save_tiny_model
from train_kit.runs import run_of, small_run

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS
from skyrl_train.compat.skyrl.absent import EXPERIMENT_METHODS, TRAINER_ATTRIBUTES, TRAINER_METHODS
from skyrl_train.compat.skyrl.batch import TrainingInputBatch
from skyrl_train.compat.skyrl.experiment import BasePPOExp
from skyrl_train.compat.skyrl.generator import GeneratorInterface, GeneratorOutput
from skyrl_train.compat.skyrl.trainer import RayPPOTrainer
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.files import write_jsonl
from skyrl_train.entrypoints.main_base import parse_cli
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.trainer import Trainer
from skyrl_train.utils.ppo_utils import register_advantage_estimator

BUFFER = ["trainer.algorithm.overlong_buffer_len=2", "trainer.algorithm.overlong_buffer_penalty_factor=0.5"]


class LengthEnv(BaseTextEnv):
    """An environment that rewards long replies."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=len(action) / 10, done=True, metadata={})


@pytest.fixture(autouse=True)
def _length() -> Iterator[None]:
    skyrl_gym.register(id="length", entry_point=lambda **_: LengthEnv())
    yield
    skyrl_gym.envs.deregister("length")


Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def train(tiny_model_path: Path, tmp_path: Path) -> Train:
    """Train for a step, without a trainer class with the default one, and return the logged metrics."""
    data = tmp_path / "rows.jsonl"
    write_jsonl(data, [prompt_row("say something", "length", data_source="words")] * 4)
    settings = ["trainer.ckpt_interval=-1", "trainer.algorithm.use_kl_loss=false", "generator.n_samples_per_prompt=4"]

    def run(trainer_class: type[RayPPOTrainer] | None, *overrides: str, name: str = "test_run") -> list[dict[str, Any]]:
        class Experiment(BasePPOExp):
            if trainer_class is not None:

                def get_trainer(self, *args: Any) -> RayPPOTrainer:
                    return trainer_class(*args)

        overrides = small_run(tmp_path, *settings, *overrides, model=tiny_model_path, data=data, name=name)
        Experiment(parse_cli(overrides)).run()
        return run_of(overrides).metrics

    return run


class DAPOTrainer(RayPPOTrainer):
    """The soft overlong punishment as DAPO trainers of SkyRL apply it: to rewards of whole responses."""

    @torch.no_grad()
    def postprocess_generator_output(self, generator_output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        buffer_len = self.cfg.trainer.algorithm.overlong_buffer.len
        factor = self.cfg.trainer.algorithm.overlong_buffer.penalty_factor
        max_length = self.cfg.generator.sampling_params.max_generate_length
        rewards = generator_output["rewards"]
        assert not isinstance(rewards[0], list), "the punishment needs one reward for each response"
        for i, response in enumerate(generator_output["response_ids"]):
            start = max_length - buffer_len
            if start < len(response) <= max_length:
                rewards[i] -= (len(response) - start) / buffer_len * factor
            elif len(response) > max_length:
                rewards[i] = 0.0
        generator_output["rewards"] = rewards
        return super().postprocess_generator_output(generator_output, uids)


def test_a_dapo_trainer_punishes_long_responses_once(train: Train, caplog: pytest.LogCaptureFixture) -> None:
    custom = train(DAPOTrainer, *BUFFER, "generator.batched=true", name="custom")[-1]
    built_in = train(None, *BUFFER, name="built-in")[-1]
    assert custom["loss/avg_final_rewards"] < custom["reward/avg_raw_reward"] - 0.1
    assert custom["loss/avg_final_rewards"] == pytest.approx(built_in["loss/avg_final_rewards"])
    assert custom["policy/grad_norm"] == pytest.approx(built_in["policy/grad_norm"])
    assert "overlong_buffer_len=2 is left to DAPOTrainer.postprocess_generator_output" in caplog.text


def test_a_hook_gets_a_reward_for_each_token_unless_rollouts_are_batched(train: Train) -> None:
    calls: list[Any] = []
    n_trained: list[float] = []

    class FilteringTrainer(RayPPOTrainer):
        def postprocess_generator_output(self, generator_output: Any, uids: Any, *, data_sources: Any) -> Any:
            calls.append((list(generator_output["rewards"]), uids, data_sources, self.global_step))
            for rewards, mask in zip(generator_output["rewards"], generator_output["loss_masks"], strict=True):
                rewards[-1] += 1.0
                mask[:] = [0] * len(mask)
            generator_output["loss_masks"][0][0] = 1
            self.all_metrics["reward/hook"] = 7.0
            self.all_timings["hook"] = 1.5
            return {name: generator_output[name] for name in ("response_ids", "rewards", "loss_masks")}

        def build_batch(self, step: Any, trajectories: Any) -> Any:
            batch = super().build_batch(step, trajectories)
            n_trained.append(batch.loss_mask.sum().item())
            return batch

    step = train(FilteringTrainer)[-1]
    ((rewards, uids, data_sources, global_step),) = calls
    assert all(len(reward) == 4 for reward in rewards)
    assert uids == [uid for uid in sorted(set(uids), key=uids.index) for _ in range(4)]
    assert data_sources == ["words"] * 16
    assert global_step == 1
    assert step["reward/hook"] == 7.0
    assert step["timing/hook"] == 1.5
    assert step["timing/postprocess_generator_output"] > 0
    assert step["loss/avg_final_rewards"] == pytest.approx(step["reward/avg_raw_reward"] + 1)
    assert n_trained == [1]


@pytest.fixture
def teacher(tiny_head_dim: int, tmp_path: Path) -> Path:
    """The path of another model."""
    return save_tiny_model(tmp_path / "teacher", seed=1, head_dim=tiny_head_dim)


def test_a_trainer_that_replaces_the_kl_penalty_distills_a_teacher(
    train: Train, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "entries", dict(ADVANTAGE_ESTIMATORS.entries))

    @register_advantage_estimator("no_op")
    def no_op(token_level_rewards: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return token_level_rewards, token_level_rewards

    class DistillingTrainer(RayPPOTrainer):
        def apply_reward_kl_penalty(self, data: TrainingInputBatch) -> TrainingInputBatch:
            gap = data["action_log_probs"] - data["base_action_log_probs"]
            data["rewards"] = -gap * data["loss_mask"]
            return data

    ref = f"trainer.ref.model.path='{teacher}'"
    in_reward = ["trainer.algorithm.use_kl_in_reward=true", "trainer.algorithm.advantage_estimator=no_op"]
    custom = train(DistillingTrainer, ref, *in_reward, name="custom")[-1]
    built_in = train(None, ref, "trainer.algorithm.advantage_estimator=on_policy_distillation", name="built-in")[-1]
    assert custom["loss/avg_raw_advantages"] == pytest.approx(built_in["loss/avg_raw_advantages"], rel=1e-4)
    assert abs(custom["loss/avg_raw_advantages"]) > 1e-3
    assert custom["policy/grad_norm"] == pytest.approx(built_in["policy/grad_norm"], rel=1e-3)


class HalvingTrainer(RayPPOTrainer):
    """A trainer that shrinks advantages, after the KL penalty and the estimator of the base class."""

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        data = super().compute_advantages_and_returns(data)
        assert data["action_log_probs"] is not None
        assert data["response_mask"].shape == data["advantages"].shape
        assert len(data.metadata["uids"]) == len(data["advantages"]) == len(data["is_last_step"])
        assert data.metadata["global_step"] == self.global_step == 1
        data["advantages"] = data["advantages"] / 2
        return data


@pytest.mark.parametrize("kl", ["false", "true"])
def test_a_trainer_that_changes_advantages_keeps_everything_else(kl: str, train: Train, teacher: Path) -> None:
    settings = [f"trainer.algorithm.use_kl_in_reward={kl}", f"trainer.ref.model.path='{teacher}'"]
    half, whole = train(HalvingTrainer, *settings, name="half")[-1], train(None, *settings, name="whole")[-1]
    name = "loss/avg_raw_advantages_abs"
    assert half.pop(name) == pytest.approx(whole.pop(name) / 2)
    for name in ("loss/avg_final_rewards", "generate/avg_num_tokens", *(["loss/avg_kl"] if kl == "true" else [])):
        assert half[name] == pytest.approx(whole[name])
    normalized = train(HalvingTrainer, *settings, "trainer.algorithm.advantage_batch_normalize=true", name="norm")[-1]
    assert normalized["policy/grad_norm"] > half["policy/grad_norm"]


def test_a_trainer_that_overrides_eval_adds_metrics(train: Train, tmp_path: Path) -> None:
    class EvaluatingTrainer(RayPPOTrainer):
        async def eval(self) -> dict[str, float]:
            metrics = await super().eval()
            return {**metrics, "eval/twice": 2 * metrics["eval/all/avg_score"], "eval/step": self.global_step}

    validation = [f"data.val_data=['{tmp_path}/rows.jsonl']", "trainer.eval_interval=1"]
    before, after = train(EvaluatingTrainer, *validation)
    assert (before["eval/step"], after["eval/step"]) == (0, 1)
    assert after["eval/twice"] == 2 * after["eval/all/avg_score"] > 0
    assert (tmp_path / "skyrl/test_run/evals/global_step_1/words.jsonl").exists()


def drop_a_reward(data: Any) -> Any:
    return {**data, "rewards": [*data["rewards"][1:], None]}


def shorten(data: Any) -> Any:
    return {**data, "rewards": data["rewards"][1:]}


def flatten(data: Any) -> Any:
    data["advantages"] = data["rewards"].sum(dim=-1)
    return data


@pytest.mark.parametrize(
    ("hook", "change", "message"),
    [
        ("postprocess_generator_output", lambda _: None, "returned a NoneType; return the rollouts' dictionary"),
        ("postprocess_generator_output", shorten, "returned 15 rewards for 16 prompts"),
        ("postprocess_generator_output", drop_a_reward, r"trajectory \d_3 has no reward; set its loss mask to 0"),
        ("compute_advantages_and_returns", lambda _: None, "returned a NoneType; return the batch"),
        ("compute_advantages_and_returns", lambda data: data, r"data\['advantages'\] is not set"),
        ("compute_advantages_and_returns", lambda data: data | {}, "returned a dict; return the batch"),
        ("compute_advantages_and_returns", flatten, r"'advantages' is \(16,\), but must be .* \(16, 4\)"),
    ],
)
def test_a_hook_that_returns_something_else_is_named(
    hook: str, change: Callable[[Any], Any], message: str, train: Train
) -> None:
    broken = type("BrokenTrainer", (RayPPOTrainer,), {hook: lambda self, data, uids=(): change(data)})
    with pytest.raises(DataError, match=rf"^BrokenTrainer\.{hook}: .*{message}"):
        train(broken)


@pytest.mark.parametrize(
    ("base", "name"),
    [*product([RayPPOTrainer], sorted(TRAINER_METHODS)), *product([BasePPOExp], sorted(EXPERIMENT_METHODS))],
)
def test_an_override_that_would_never_be_called_is_refused(base: type, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"Mine\.{name} would never be called; (override|add|set) .* instead"):
        type("Mine", (base,), {name: lambda self: None})


def test_methods_to_override_instead_exist() -> None:
    for cls, table in ((Trainer, TRAINER_METHODS), (BasePPOExp, EXPERIMENT_METHODS)):
        for instead in table.values():
            names = re.findall(r"\w+", instead.removeprefix("override ").partition(" of the ")[0])
            owner = {"experiment": BasePPOExp, "generator": GeneratorInterface}.get(instead.split()[-1], cls)
            if instead.startswith("override"):
                assert all(callable(getattr(owner, name)) for name in names if name != "or"), instead


@pytest.mark.parametrize("name", sorted(TRAINER_METHODS | TRAINER_ATTRIBUTES))
def test_what_skyrl_has_and_this_trainer_lacks_is_explained(name: str) -> None:
    trainer = RayPPOTrainer(SkyRLConfig(), None, None, None, None, None, GeneratorInterface())
    instead = re.escape((TRAINER_METHODS | TRAINER_ATTRIBUTES)[name])
    with pytest.raises(AttributeError, match=rf"no attribute {name!r}, which SkyRL has; {instead} instead"):
        getattr(trainer, name)


def test_an_experiment_returns_a_trainer_of_skyrl(train: Train) -> None:
    with pytest.raises(ConfigError, match=r"Experiment\.get_trainer returned a tuple; return a subclass of .*RayPPO"):
        train(lambda *args: args)  # type: ignore[arg-type]
