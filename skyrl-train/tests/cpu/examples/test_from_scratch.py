"""The example in one file: it is short, it learns, and its update is the trainer's."""

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.workers import SingleRankGroup, complete, policy_objective
from transformers import PreTrainedModel

from examples import from_scratch
from examples.catch import recipe, warm_start
from examples.catch.catch_dataset import CatchDataset
from examples.catch.env import CatchEnv
from skyrl_train.algorithms import advantage_estimator
from skyrl_train.config import load_config
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.conversation import TokenConversation
from skyrl_train.inference_engines.base import EngineResult
from skyrl_train.learner import Learner
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.types import Segment, Trajectory, TrajectoryID

N_PROMPTS, GROUP_SIZE = 4, 8
LEARNING_RATE = 1e-3


@pytest.fixture
def small(short_start: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the example play few games with a model that knows little more than their format."""
    monkeypatch.setattr(from_scratch, "N_PROMPTS", N_PROMPTS)
    monkeypatch.setattr(from_scratch, "GROUP_SIZE", GROUP_SIZE)
    monkeypatch.setattr(warm_start, "N_STEPS", 40)
    monkeypatch.setattr(recipe, "CatchDataset", partial(CatchDataset, train_size=64, test_size=8))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(n_steps: int, capsys: pytest.CaptureFixture[str]) -> tuple[float, float]:
    """Run the example; return the catch rates that it prints, in percent."""
    from_scratch.main(["--steps", str(n_steps)])
    printed = re.search(r"([\d.]+)% before, ([\d.]+)% after", capsys.readouterr().out)
    assert printed
    return float(printed[1]), float(printed[2])


def test_it_fits_on_three_screens() -> None:
    assert len(Path(from_scratch.__file__).read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("n_updates", [1, 2])
def test_its_first_step_produces_the_weights_of_the_trainer(
    n_updates: int, small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adam's first step hardly depends on the size of a gradient, so gradients and their norms are compared as well."""
    steps: list[tuple[PreTrainedModel, list[from_scratch.Rollout], list[tuple[torch.Tensor, torch.Tensor]]]] = []
    norms: list[torch.Tensor] = []
    update, clip = from_scratch.update, torch.nn.utils.clip_grad_norm_

    def record(model: PreTrainedModel, optimizer: torch.optim.Optimizer, rollouts: list[Any]) -> None:
        before = copy.deepcopy(model)
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args, **kw: norms.append(clip(*args, **kw)))
            update(model, optimizer, rollouts)
        after = [(p.detach().clone(), optimizer.state[p]["exp_avg"].clone()) for p in model.parameters()]
        steps.append((before, rollouts, after))

    monkeypatch.setattr(from_scratch, "update", record)
    monkeypatch.setattr(from_scratch, "MINI_BATCH", N_PROMPTS * GROUP_SIZE // n_updates)
    run(1, capsys)
    ((model, rollouts, after),) = steps

    optimizer = {"lr": LEARNING_RATE, "adam_betas": [0.9, 0.95], "weight_decay": 0.0}
    algorithm = {"eps_clip_high": 0.28, "use_kl_loss": False}
    settings: dict[str, Any] = {"policy": {"optimizer_config": optimizer}, "algorithm": algorithm}
    cfg = load_config({"trainer": settings | {"policy_mini_batch_size": N_PROMPTS // n_updates}}).trainer
    worker = SingleRankGroup("policy", model, cfg, policy_objective(cfg))
    learner = Learner(cfg, advantage_estimator("grpo"), policy=worker.group)
    (tokenizer_folder,) = Path("outputs/catch/models").iterdir()
    chat = ChatEncoder(load_tokenizer(str(tokenizer_folder)))
    trajectories = [as_trajectory(rollout, chat) for rollout in rollouts]
    batch, _ = learner.advantages(complete(learner.score(build_training_batch(trajectories, pad_token_id=0))))
    metrics = complete(learner.update_policy(batch)).numbers()

    assert len(norms) == n_updates
    assert torch.stack(norms).mean().item() == pytest.approx(metrics["policy/grad_norm"], rel=1e-5)
    means = [worker.optimizer.state[p]["exp_avg"] for p in model.parameters()]
    largest = max(mean.abs().max().item() for mean in means)
    assert largest > 1e-4
    for parameter, expected_mean, (weights, mean) in zip(model.parameters(), means, after, strict=True):
        torch.testing.assert_close(mean, expected_mean, rtol=0, atol=1e-5 * largest)
        torch.testing.assert_close(weights, parameter.detach(), rtol=0, atol=LEARNING_RATE / 20)
        assert (weights - parameter).square().mean().sqrt() < LEARNING_RATE / 1000


def as_trajectory(rollout: from_scratch.Rollout, chat: ChatEncoder) -> Trajectory:
    """Play the sampled tokens of a rollout again, with the trainer's conversation, which must give the same tokens."""
    n_prompt = rollout.loss_mask.index(1)
    text = chat.decode_all(rollout.tokens[:n_prompt])
    ball_x, paddle_x = (int(re.search(pattern, text)[1]) for pattern in (r"ball=\((\d)", r"paddle_x=(\d)"))
    env = CatchEnv({}, {"extra_info": {"ball_x": ball_x, "paddle_x": paddle_x}})
    conversation, rewards = TokenConversation(chat, None), []
    conversation._start_row(rollout.tokens[:n_prompt])
    for token in (token for token, is_sampled in zip(rollout.tokens, rollout.loss_mask, strict=True) if is_sampled):
        reply = chat.decode([token])
        conversation.add_turn(EngineResult([token], None, "length", ()), reply)
        step = env.step(reply)
        rewards.append(step["reward"])
        conversation.observe(step["observations"])
    conversation.finish()
    (row,) = conversation.rows
    assert (row.token_ids, row.loss_mask) == (rollout.tokens, rollout.loss_mask[n_prompt:])
    assert [r for r, is_sampled in zip(rollout.rewards, rollout.loss_mask, strict=True) if is_sampled] == rewards
    segment = Segment(row.token_ids, n_prompt, row.loss_mask, rollout.rewards[n_prompt:])
    draw = int(rollout.group)
    return Trajectory(TrajectoryID(str(draw), 0, draw), "catch", "catch", (segment,), "stop")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_it_learns(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = run(from_scratch.N_STEPS, capsys)
    assert before < 20
    assert after > 45
