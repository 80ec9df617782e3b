import json
from dataclasses import replace
from pathlib import Path

import pytest
from train_kit.trajectories import make_segment, make_trajectory
from train_kit.vision_models import ask, conversation_row, picture, save_vision_model
from transformers import PreTrainedTokenizerBase

from skyrl_gym.images import read_image
from skyrl_train.compat.skyrl.generator import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl_train.compat.skyrl.sampling_params import to_sampling_params
from skyrl_train.config import SkyRLConfig, load_config
from skyrl_train.dataset.files import read_rows, write_jsonl
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.evaluate import dump_evaluation, eval_metrics, evaluate, trajectory_row
from skyrl_train.generators.base import BatchMetadata
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.types import Message, PromptRow, TrajectoryID, Turn

SOURCES = ["maths/easy", "games", None, "maths/easy", "games"]


@pytest.fixture
def dataset(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
    """Five prompts from three sources."""
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "data_source": s} for i, s in enumerate(SOURCES)]
    write_jsonl(tmp_path / "validation.jsonl", rows)
    return PromptDataset(str(tmp_path / "validation.jsonl"), tiny_tokenizer, max_prompt_length=100)


@pytest.fixture
def cfg() -> SkyRLConfig:
    """Two samples per prompt, in batches of two prompts."""
    sampling = {"max_generate_length": 9, "temperature": 0.3, "top_p": 0.8, "stop": "END"}
    generator = {"eval_n_samples_per_prompt": 2, "eval_sampling_params": sampling}
    return load_config(
        {"trainer": {"eval_batch_size": 2}, "generator": generator, "environment": {"env_class": "guess"}}
    )


class NumberGenerator(GeneratorInterface):
    """A generator as SkyRL's scripts write it: the reward of second samples is the prompt's number."""

    def __init__(self) -> None:
        self.inputs: list[GeneratorInput] = []

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        self.inputs.append(input_batch)
        n = len(input_batch["prompts"])
        numbers = [int(prompt[0]["content"]) for prompt in input_batch["prompts"]]
        return GeneratorOutput(
            prompt_token_ids=[[1]] * n,
            response_ids=[[2, 3]] * n,
            rewards=[float(i * id.repetition_id) for i, id in zip(numbers, input_batch["trajectory_ids"], strict=True)],
            loss_masks=[[1, 1]] * n,
            stop_reasons=["stop"] * n,
            rollout_logprobs=[[-1.0, -1.0]] * n,
            env_metrics=[{"n": i} for i in numbers],
            rollout_metrics={"generate/mine": float(n)},
        )


async def test_every_prompt_is_played_in_batches_with_eval_sampling_params(
    dataset: PromptDataset, cfg: SkyRLConfig
) -> None:
    generator = NumberGenerator()
    _, trajectories = await evaluate(dataset, generator, cfg, global_step=12)
    assert [len(batch["prompts"]) for batch in generator.inputs] == [4, 4, 2]
    played = [id for batch in generator.inputs for id in batch["trajectory_ids"]]
    first = 12 * 5  # no two evaluations share a draw
    assert played == [TrajectoryID(str(uid), i, first + uid, "eval") for uid in range(5) for i in range(2)]
    assert [t.id for t in trajectories] == played
    for batch in generator.inputs:
        assert batch["batch_metadata"] == BatchMetadata(12, "eval", cfg.trainer.seed)
        expected = SamplingParams(max_new_tokens=9, temperature=0.3, top_p=0.8, stop=("END",))
        assert batch["sampling_params"] == to_sampling_params(expected)
        assert set(batch["env_classes"]) == {"guess"}


async def test_rows_are_read_when_their_batch_is_played(dataset: PromptDataset, cfg: SkyRLConfig) -> None:
    """Rows may have large images."""
    read: list[int] = []

    class Recorded:
        def __len__(self) -> int:
            return len(dataset)

        def __getitem__(self, index: int) -> PromptRow:
            read.append(index)
            return dataset[index]

    class Generator(NumberGenerator):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            n_read.append(len(read))
            return await super().generate(input_batch)

    n_read: list[int] = []
    await evaluate(Recorded(), Generator(), cfg, global_step=0)  # type: ignore[arg-type]
    assert n_read == [2, 4, 5]


async def test_metrics_over_everything_and_per_source(dataset: PromptDataset, cfg: SkyRLConfig) -> None:
    """The rewards of prompt i are 0 and i."""
    metrics, _ = await evaluate(dataset, NumberGenerator(), cfg, global_step=0)
    scores = {name: value for name, value in metrics.items() if not name.startswith(("eval/generate", "eval/env"))}
    assert scores == {
        "eval/all/avg_score": 1.0,
        "eval/all/pass_at_1": pytest.approx(0.4),
        "eval/all/pass_at_2": 0.8,
        "eval/all/mean_positive_reward": 1.0,
        "eval/maths_easy/avg_score": 0.75,
        "eval/maths_easy/pass_at_1": 0.25,
        "eval/maths_easy/pass_at_2": 0.5,
        "eval/maths_easy/mean_positive_reward": 0.75,
        "eval/games/avg_score": 1.25,
        "eval/games/pass_at_1": 0.5,
        "eval/games/pass_at_2": 1.0,
        "eval/games/mean_positive_reward": 1.25,
        "eval/unknown/avg_score": 1.0,
        "eval/unknown/pass_at_1": 0.5,
        "eval/unknown/pass_at_2": 1.0,
        "eval/unknown/mean_positive_reward": 1.0,
    }
    assert metrics["eval/environment/n"] == metrics["eval/environment/guess/n"] == 2.0
    assert metrics["eval/generate/avg_num_tokens"] == 2.0
    assert metrics["eval/generate/mine"] == (4 + 4 + 2) / 3


def test_invalid_trajectories_are_counted_and_otherwise_ignored() -> None:
    good = [make_trajectory("a", [1.0], data_source="s"), make_trajectory("b", [0.0], data_source="s")]
    bad = [
        make_trajectory(uid, None, data_source=source, stop_reason="env_error")
        for uid, source in (("c", "s"), ("d", "broken"))
    ]
    assert eval_metrics([*good, *bad], 1, None) == eval_metrics(good, 1, None) | {
        "eval/generate/n_invalid": 2.0,
        "eval/generate/n_invalid/env_error": 2.0,
    }


def test_the_dump_has_a_file_per_source_and_one_with_all_metrics(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    chat = ChatEncoder(tiny_tokenizer)
    prompt_ids = chat.prompt_ids([Message(role="user", content="L or R?")])
    response_ids = tiny_tokenizer("L<|im_end|>", add_special_tokens=False)["input_ids"]
    n_tokens = len(response_ids)
    good = make_trajectory(
        "7",
        [0.0] * (n_tokens - 1) + [1.0],
        repetition=2,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        data_source="games/catch",
        env_extras={"data_source": "games/catch", "extra_info": {"index": 7}},
        env_metrics={"steps": 1},
    )
    bad = make_trajectory("8", None, stop_reason="env_error", error="catch.step raised OSError", prompt_ids=prompt_ids)
    (tmp_path / "abandoned.jsonl").write_text("{}\n")
    dump_evaluation(tmp_path, [good, bad], {"eval/all/avg_score": 1.0}, chat, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "aggregated_results.jsonl",
        "games_catch.jsonl",
        "unknown.jsonl",
    ]
    assert read_rows(str(tmp_path / "games_catch.jsonl")) == [
        {
            "input_prompt": "<|im_start|>user\nL or R?<|im_end|>\n<|im_start|>assistant\n",
            "output_response": "L<|im_end|>",
            "images": [],
            "score": [0.0] * (n_tokens - 1) + [1.0],
            "stop_reason": "stop",
            "env_class": "guess",
            "env_extras": {"data_source": "games/catch", "extra_info": {"index": 7}},
            "env_metrics": {"steps": 1},
            "data_source": "games/catch",
            "uid": "7_2",
            "turns": [],
            "earlier": [],
            "total_reward": 1.0,
            "is_success": True,
            "reward_components": {},
            "weight_versions": [],
            "timing": {},
            "n_attempts": 1,
            "error": None,
        }
    ]
    (row,) = read_rows(str(tmp_path / "unknown.jsonl"))
    assert (row["score"], row["stop_reason"], row["error"]) == (None, "env_error", "catch.step raised OSError")
    assert json.loads((tmp_path / "aggregated_results.jsonl").read_text()) == {"eval/all/avg_score": 1.0}


def test_all_rows_of_a_trajectory_are_dumped(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    chat = ChatEncoder(tiny_tokenizer)
    first, second = (tiny_tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("L", "R"))
    turn = Turn(0, len(first), 1, 0.5, "stop")
    earlier = make_segment([0.5] * len(first), prompt_ids=first, response_ids=first, logprobs=None, turns=[turn])
    whole = make_trajectory(
        prompt_ids=second,
        response_ids=second,
        loss_mask=[1] * len(second),
        logprobs=None,
        rewards=[1.0] * len(second),
        earlier=(earlier,),
        turns=[Turn(0, len(second), 1, 1.0, "stop")],
        n_attempts=2,
        reward_components={"right": 1.5},
    )
    row = trajectory_row(whole, chat, None)
    assert (row["input_prompt"], row["output_response"], row["score"]) == ("R", "R", whole.rewards)
    assert row["earlier"] == [{"input_prompt": "L", "output_response": "L", "images": [], "score": earlier.rewards}]
    assert [turn["segment"] for turn in row["turns"]] == [0, 1]
    assert row["total_reward"] == whole.total_reward
    assert (row["n_attempts"], row["reward_components"]) == (2, {"right": 1.5})
    invalid = trajectory_row(replace(whole, error="it broke"), chat, None)
    assert (invalid["score"], invalid["total_reward"], invalid["earlier"][0]["score"]) == (None, None, None)


def test_markers_replace_the_placeholders_of_images(tmp_path: Path) -> None:
    """A placeholder that the model has sampled is text."""
    tokenizer = load_tokenizer(str(save_vision_model(tmp_path, "idefics3")))
    chat = ChatEncoder(tokenizer)
    placeholder = tokenizer.convert_tokens_to_ids("<image>")
    shown = [picture(seed) for seed in range(3)]
    row = conversation_row(chat, ask(shown[0], "A ", shown[1]), ask("B", shown[2]), reply=[placeholder])
    text = chat.decode_all(row.token_ids)
    for image in shown:
        name = read_image(image).file_name
        text = text.replace("<image>" * 4, f"<|image:{name[:8]}|>", 1)
    written = trajectory_row(replace(make_trajectory(), segments=(row,)), chat, None)
    assert written["input_prompt"] + written["output_response"] == text
    assert text.count("<image>") == 2
    assert written["images"] == [read_image(image).file_name for image in shown]
    assert written["input_prompt"].count("<|image:") == 2


def test_sources_with_reserved_or_colliding_names(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """`x/y` and `x_y` share file and metrics, and a source named like an aggregate is renamed."""
    names = ["all", "aggregated_results", "games", "x/y", "x_y"]
    trajectories = [make_trajectory(str(i), [float(i)], data_source=name) for i, name in enumerate(names)]
    metrics = eval_metrics(trajectories, 1, None)
    scores = [metrics[f"eval/{name}/avg_score"] for name in ("all", "all_", "x_y")]
    assert scores == [2.0, 0.0, 3.5]
    dump_evaluation(tmp_path, trajectories, metrics, ChatEncoder(tiny_tokenizer), None)
    sources = {path.name: [row.get("data_source") for row in read_rows(str(path))] for path in tmp_path.iterdir()}
    assert sources == {
        "aggregated_results.jsonl": [None],
        "aggregated_results_.jsonl": ["aggregated_results"],
        "all_.jsonl": ["all"],
        "games.jsonl": ["games"],
        "x_y.jsonl": ["x/y", "x_y"],
    }
