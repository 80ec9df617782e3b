import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from PIL import Image
from train_kit.datasets import write_pairs, write_prompts
from train_kit.messages import assistant, user
from train_kit.models import CPU
from train_kit.runs import expect_error, preference_run, small_run, train
from train_kit.vision_models import ask, pictured_reward, write_pictures
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from skyrl_train.config.generator import RewardModelConfig
from skyrl_train.entrypoints.cli import main
from skyrl_train.errors import ConfigError
from skyrl_train.generators import rewards
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.rewards import RewardModel, RewardSample, register_reward_function
from skyrl_train.media.processing import save_tokenizer
from skyrl_train.models.loading import load_model, load_tokenizer
from skyrl_train.types import Segment, Trajectory, TrajectoryID


@pytest.fixture(scope="session")
def reward_model_path(
    tiny_model_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A model with random rewards."""
    folder = tmp_path_factory.mktemp("reward-model")
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model_path, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.config.pad_token_id = tiny_tokenizer.pad_token_id
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def transformers_reward(folder: Path, token_ids: list[int]) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([token_ids])).logits[0, 0])


@pytest.mark.catch_tokenizer
@pytest.mark.parametrize("max_tokens", [1, 12, 16384])
def test_rewards_are_those_of_transformers(
    max_tokens: int, reward_model_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    cfg = RewardModelConfig(path=str(reward_model_path), max_tokens_per_batch=max_tokens)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, 60, (6,), generator=generator).tolist()
    rows = [prompt + torch.randint(5, 60, (n,), generator=generator).tolist() for n in (3, 1, 9, 4)]
    rows.append([*rows[0], tiny_tokenizer.eos_token_id])
    rows.append([*rows[0], *[tiny_tokenizer.pad_token_id] * 2])  # a policy may sample the pad token
    expected = [transformers_reward(reward_model_path, row) for row in rows]
    assert RewardModel(cfg, tiny_tokenizer).score(list(map(Segment.start, rows))) == pytest.approx(
        expected, rel=1e-5, abs=1e-5
    )
    assert expected[5] == pytest.approx(expected[0], abs=1e-5) != expected[4]


def test_images_are_read_as_by_transformers(vision_model_path: Path, tmp_path: Path) -> None:
    """Rows with images and without, of different lengths, in one batch."""
    folder, tokenizer = tmp_path / "reward", load_tokenizer(str(vision_model_path))
    model = load_model(str(vision_model_path), "reward", dtype=torch.float32, device=CPU, pad_token_id=0)
    torch.nn.init.normal_(model.score.weight, std=0.2)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, str(folder))
    write_pictures(tmp_path)
    conversations = [([], "Nowhere."), (["0.png"], "Left"), (["1.png", "2.png"], "Up and left")]
    chat, rows, expected = ChatEncoder(tokenizer), [], []
    for names, answer in conversations:
        paths = [tmp_path / name for name in names]
        prompt, reply = ask(*map(Image.open, paths), "Where?"), assistant(answer)
        token_ids = chat.prompt_ids(prompt)
        row = Segment.start(token_ids, chat.find_spans(token_ids, prompt))
        row.append_sampled([*chat.encode(answer), tokenizer.eos_token_id], [0.0] * (len(chat.encode(answer)) + 1), None)
        rows.append(row)
        places: list[Any] = [*[{"type": "image"}] * len(names), {"type": "text", "text": "Where?"}]
        expected.append(pictured_reward(folder, [user(places), reply], paths))
    scores = RewardModel(RewardModelConfig(path=str(folder)), tokenizer).score(rows)
    assert scores == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert len({round(score, 3) for score in scores}) == 3


def test_a_text_model_does_not_reward_images(
    reward_model_path: Path, vision_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the configured path, also if it is an adapter."""
    monkeypatch.setattr(rewards, "check_same_tokens", lambda *_, **__: None)
    adapter = peft.LoraConfig(
        base_model_name_or_path=str(reward_model_path), task_type="SEQ_CLS", modules_to_save=["score"]
    )
    adapter.save_pretrained(str(tmp_path))
    for path in (reward_model_path, tmp_path):
        message = f"path={path} reads only text, but the policy reads images; use a vision-language reward model"
        with pytest.raises(ConfigError, match=message):
            RewardModel(RewardModelConfig(path=str(path)), vision_tokenizer)


def test_a_rollout_beyond_the_context_gets_none(
    reward_model_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    model = RewardModel(RewardModelConfig(path=str(reward_model_path)), tiny_tokenizer)

    def sample(n_tokens: int) -> RewardSample:
        segment = Segment([7] * n_tokens, 1, [1] * (n_tokens - 1), [0.0] * (n_tokens - 1))
        return RewardSample(Trajectory(TrajectoryID("0", 0), "reply", "", (segment,), "stop"), "", "")

    short, long = model([sample(20), sample(2000)])
    assert short is not None
    assert long is None


def rollouts_run(folder: Path, model: Path, reward_model: Path, *overrides: str) -> list[str]:
    """Return the overrides of a run that rewards 64 short replies a step with the reward model, and saves nothing."""
    prompts = write_prompts(folder / "prompts.jsonl", 8)
    return small_run(
        folder,
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=8",
        "trainer.eval_interval=-1",
        "trainer.ckpt_interval=-1",
        "environment.env_class=reply",
        "generator.n_samples_per_prompt=8",
        "generator.sampling_params.max_generate_length=4",
        f"generator.reward_model.path='{reward_model}'",
        *overrides,
        model=model,
        data=prompts,
        val_data=prompts,
    )


def test_a_policy_learns_from_a_reward_model(tmp_path: Path, tiny_model_path: Path, reward_model_path: Path) -> None:
    schedule = ["trainer.epochs=15", "trainer.eval_interval=15", "trainer.eval_before_train=true"]
    learning_rate = "trainer.policy.optimizer_config.lr=1e-2"
    before, *steps = train(
        *rollouts_run(tmp_path, tiny_model_path, reward_model_path, *schedule, learning_rate)
    ).metrics
    for step in steps:
        assert step["reward/avg_raw_reward"] == pytest.approx(step["reward/component/reward_model"], abs=1e-5)
    rewards = [step["reward/avg_raw_reward"] for step in steps]
    spread = max(rewards[:2]) - min(rewards[:2])
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + max(0.5, spread)
    assert steps[-1]["eval/all/avg_score"] > before["eval/all/avg_score"]


def test_a_reward_model_that_was_trained_as_an_adapter(
    tmp_path: Path, tiny_model_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is merged, the export is merged or read as an adapter: all give the same rewards."""
    options = ["trainer.policy.model.lora.rank=4", "trainer.policy.optimizer_config.lr=1e-1"]
    reward_run = preference_run(tmp_path / "reward", *options, model=tiny_model_path, data=write_pairs(tmp_path))
    run = train(*reward_run, command="reward")
    merged = tmp_path / "of_checkpoint", tmp_path / "of_export"
    adapter = run.export(4, "reward")
    assert main(["merge", "checkpoint", str(run.folder / "ckpts"), str(merged[0]), "--role=reward"]) == 0
    assert "25 tensors, 15 of them changed" in capsys.readouterr().out
    assert main(["merge", "adapter", str(adapter), str(merged[1])]) == 0
    rows = [[5, 6, 7, tiny_tokenizer.eos_token_id], [9, 8, 7, 6, 5]]
    expected = [transformers_reward(merged[1], row) for row in rows]
    for path in (adapter, *merged):
        scores = RewardModel(RewardModelConfig(path=str(path)), tiny_tokenizer).score(list(map(Segment.start, rows)))
        assert scores == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert abs(train(*rollouts_run(tmp_path, tiny_model_path, adapter)).metrics[-1]["reward/avg_raw_reward"]) > 1e-2


def test_adapters_that_give_no_reward_are_refused(
    tmp_path: Path, tiny_model_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"]}
    file = tmp_path / "adapter/adapter_config.json"
    file.parent.mkdir()
    run = [*rollouts_run(tmp_path, tiny_model_path, file.parent), "--dry-run"]

    def write(**changes: Any) -> RewardModelConfig:
        file.write_text(json.dumps(settings | changes))
        return RewardModelConfig(path=str(file.parent))

    with pytest.raises(ConfigError, match="is an adapter without a reward head; use one that `skyrl reward` has"):
        RewardModel(write(base_model_name_or_path=str(tiny_model_path)), tiny_tokenizer)
    assert "has adapter_config.json and no adapter_model.safetensors" in expect_error(*run)
    with pytest.raises(ConfigError, match="is an adapter that does not name its base model; merge both with"):
        RewardModel(write(task_type="SEQ_CLS", modules_to_save=["score"]), tiny_tokenizer)
    write(base_model_name_or_path="/nowhere")
    assert "is an adapter of base_model_name_or_path=/nowhere: there is no such folder" in expect_error(*run)


def test_models_that_give_no_reward_are_refused(
    tmp_path: Path, tiny_model_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ConfigError, match=r"generator\.reward_model\.path=.* lacks 1 weights .*score\.weight"):
        RewardModel(RewardModelConfig(path=str(tiny_model_path)), tiny_tokenizer)
    with pytest.raises(ConfigError, match="reward function 'reward_model' is already registered"):
        register_reward_function("reward_model")(lambda samples: [0.0] * len(samples))
    message = expect_error(*rollouts_run(tmp_path, tiny_model_path, Path("/nowhere")))
    assert "generator.reward_model.path=/nowhere: there is no such folder" in message


def test_another_tokenizer_is_refused(
    tmp_path: Path, reward_model_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    AutoModelForSequenceClassification.from_pretrained(reward_model_path).save_pretrained(tmp_path)
    content = json.loads((reward_model_path / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    for file in reward_model_path.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"generator\.reward_model\.path=.* has another tokenizer than the policy"):
        RewardModel(RewardModelConfig(path=str(tmp_path)), tiny_tokenizer)
