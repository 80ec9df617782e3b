import copy
from pathlib import Path
from typing import Any

import pytest
from agent_kit.engines import TOKENIZER, ScriptedEngine, tool_call
from agent_kit.trajectories import FINISH, GENERAL, ROW, play_one, play_row
from train_kit.engines import LIMITS
from train_kit.models import load_on_cpu
from train_kit.vision_models import ask, picture, save_vision_model

from skyrl_agent import AgentConfig, AutoAgentRunner, BaseAgent, Outcome
from skyrl_gym.images import read_image
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.hf.general import GeneralEngine
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.rendering.template import ChatTemplate


async def test_a_turn_that_is_cut_off_at_its_own_limit_continues() -> None:
    trajectory, _ = await play_one(["x" * 300, FINISH], sampling_params={"max_tokens": 100})
    assert trajectory.total_reward == 1.0
    assert trajectory.turns[0].end - trajectory.turns[0].start == 100


class Impatient(BaseAgent):
    """An agent that asks twice without a new message."""

    async def run(self) -> Outcome:
        await self.chat.generate()
        await self.chat.generate()
        return Outcome("FINISH")


@pytest.mark.parametrize(("max_tokens", "is_valid"), [(100, False), (5, True)])
async def test_a_second_reply_needs_a_message_unless_the_first_was_cut_off(max_tokens: int, is_valid: bool) -> None:
    settings: dict[str, Any] = {"sampling_params": {"max_tokens": max_tokens}, "n_retries": 0}
    trajectory, _ = await play_one(["hello there"] * 2, agent_cls=f"{__name__}.Impatient", tools=(), **settings)
    assert trajectory.is_valid == is_valid
    assert is_valid or "append a message before the next one" in str(trajectory.error)


async def test_thoughts_are_removed_from_the_history_and_trained_on() -> None:
    replies = ["<think>I compute.</think>" + tool_call("code_interpreter", code="1"), FINISH]
    trajectory, engine = await play_one(replies, remove_think_tokens=True)
    assert len(trajectory.segments) == 2
    assert "I compute" not in engine.prompts()[1]
    first = trajectory.segments[0]
    assert "I compute" in TOKENIZER.decode(first.response_ids)
    assert all(first.loss_mask)
    merged, engine = await play_one(replies, qwen3_acc_thinking=False)
    assert len(merged.segments) == 1
    assert "I compute" in engine.prompts()[1]


def test_a_template_without_system_messages_is_named() -> None:
    strict = copy.deepcopy(TOKENIZER)
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system.') }}{% endif %}"
        + str(TOKENIZER.chat_template)
    )
    cfg = AgentConfig.model_validate({"task": GENERAL, "tools": ("finish",)})
    with pytest.raises(ConfigError, match="the chat template rejects the system message that describes the tools"):
        AutoAgentRunner.from_task(cfg, ScriptedEngine(), strict)


class Verbose(BaseAgent):
    """An agent that adds, or starts with, as many characters as its instance says."""

    async def run(self) -> Outcome:
        text = "word " * (self.instance["n_chars"] // 5)
        where = self.instance["where"]
        if where == "prompt":
            self.chat.reset([{"role": "user", "content": text}])
        await self.chat.generate()
        if where == "history":
            self.chat.reset([{"role": "user", "content": text}])
        else:
            self.chat.append("user", "Go on." if where == "last" else text)
        if where == "last":
            self.chat.append_to_last(text)
        await self.chat.generate()
        return Outcome("FINISH")


@pytest.mark.parametrize("where", ["prompt", "history", "message", "last"])
async def test_text_that_cannot_fit_is_not_tokenized(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million characters would take many seconds, in which no other trajectory continues."""
    lengths: list[int] = []
    encode = ChatTemplate.encode

    def record(self: ChatTemplate, text: str) -> list[int]:
        lengths.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(ChatTemplate, "encode", record)
    row = {**ROW, "where": where, "n_chars": 10_000_000}
    settings: dict[str, Any] = {"context_length": 20_000, "tools": (), "n_retries": 0}
    trajectory, _ = await play_one(["hm", "hm"], row, agent_cls=f"{__name__}.Verbose", **settings)
    assert trajectory.stop_reason == ("prompt_too_long" if where == "prompt" else "CONTEXT_WINDOW_EXCEEDED")
    assert max(lengths) < 1_000_000


async def test_parts_of_text_are_the_text_of_a_prompt() -> None:
    parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]
    prompts = []
    for content in (parts, "What is the capital of France?"):
        row = {**ROW, "prompt": [{"role": "user", "content": content}]}
        trajectory, engine = await play_one([FINISH], row, enable_turn_reminder=True)
        assert trajectory.total_reward == 1.0
        prompts += engine.prompts()
    assert prompts[0] == prompts[1]


async def test_a_vision_language_model_sees_the_images_of_a_prompt(tmp_path: Path) -> None:
    path = save_vision_model(tmp_path, "idefics3")
    tokenizer = load_tokenizer(str(path))
    engine = GeneralEngine(load_on_cpu(path), tokenizer, **LIMITS)
    generator = {"max_iterations": 2, "sampling_params": {"max_tokens": 3}, "enable_turn_reminder": True}
    cfg = AgentConfig.model_validate({"task": GENERAL, "tools": ("finish",), "generator": generator})
    row = {**ROW, "prompt": ask("Whose capital is this? ", picture(1), picture(2))}
    (trajectory,) = await play_row(AutoAgentRunner.from_task(cfg, engine, tokenizer), row)
    await engine.close()
    assert (trajectory.error, len(trajectory.turns)) == (None, 2)
    assert [span.image for span in trajectory.segments[0].images] == [read_image(picture(1)), read_image(picture(2))]


async def test_an_engine_that_reads_only_text_refuses_the_images_of_a_prompt(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_vision_model(tmp_path, "idefics3")))
    cfg = AgentConfig.model_validate({"task": GENERAL, "tools": ("finish",), "generator": {"n_retries": 0}})
    row = {**ROW, "prompt": ask("Whose capital is this? ", picture(1))}
    (trajectory,) = await play_row(AutoAgentRunner.from_task(cfg, ScriptedEngine([FINISH]), tokenizer), row)
    assert "this engine reads only text" in str(trajectory.error)


async def test_a_text_model_refuses_the_images_of_a_prompt() -> None:
    trajectory, _ = await play_one([FINISH], {**ROW, "prompt": ask("Whose capital is this? ", picture(1))})
    assert "reads only text; use a vision-language model" in str(trajectory.error)
