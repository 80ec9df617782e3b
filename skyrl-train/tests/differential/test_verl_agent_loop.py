"""The agent loop that verl runs for each sample, with verl's own classes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent_kit.engines import TOKENIZER, ScriptedEngine, tool_call
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

from skyrl_agent.integrations.verl import SkyRLAgentLoop
from skyrl_train.errors import ConfigError, EnvError
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams

TASK = {
    "task": "skyrl_agent.tasks.general_react.GeneralReactTask",
    "tools": ["finish", "code_interpreter"],
    "generator": {
        "infer_backend": "verl",
        "backend_config": {"model_max_len": 100_000},
        "n_retries": 0,
        "sampling_params": {"temperature": 0.1, "stop": ["###"]},
    },
}
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


class ServerManager:
    """verl's server manager, with scripted replies."""

    def __init__(self, replies: Any) -> None:
        self.engine = ScriptedEngine(replies)
        self.sampling_params: list[dict[str, Any]] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        self.sampling_params.append(sampling_params)
        request = EngineRequest(prompt_ids, SamplingParams(sampling_params["max_tokens"]), 0, request_id)
        (result,) = await self.engine.generate([request])
        return TokenOutput(token_ids=result.token_ids, log_probs=result.logprobs, stop_reason=None)


def loop(tmp_path: Path, manager: ServerManager, **task: Any) -> SkyRLAgentLoop:
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump({**TASK, **task}))
    cfg = OmegaConf.create({"actor_rollout_ref": {"rollout": {}, "model": {}}, "data": {}})
    wrapped = DictConfigWrap(cfg), manager, TOKENIZER, None, None, DictConfigWrap(cfg.data)
    return SkyRLAgentLoop(*wrapped, task_yaml=str(path))


async def play(agent_loop: SkyRLAgentLoop, **row: Any) -> AgentLoopOutput:
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    columns = {"raw_prompt": prompt, "data_source": "nq", "reward_model": {"ground_truth": "Paris"}, "index": 3}
    return await agent_loop.run(dict(SAMPLING), **{**columns, **row})


async def test_a_sample_is_a_trajectory_of_the_agent(tmp_path: Path) -> None:
    replies = [tool_call("code_interpreter", code="print(1)"), tool_call("finish", answer="Paris")]
    manager = ServerManager(replies)
    output = await play(loop(tmp_path, manager))
    assert (output.reward_score, output.num_turns) == (1.0, 4)
    assert output.extra_fields == {"stop_reason": "FINISH_TOOL"}
    n_tokens = len(output.response_ids)
    assert len(output.response_mask) == len(output.response_logprobs or []) == n_tokens
    sampled = [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    assert TOKENIZER.decode(sampled) == "".join(f"{reply}<|im_end|>" for reply in replies)
    last = manager.engine.requests[-1].prompt_ids
    assert last == (output.prompt_ids + output.response_ids)[: len(last)]
    sampled = manager.sampling_params[0]
    assert (sampled["temperature"], sampled["stop"]) == (0.7, ["###"])  # verl's, and the task file's
    assert len({request.session_id for request in manager.engine.requests}) == 1


async def test_limits_hold_for_all_loops_that_verl_creates(tmp_path: Path) -> None:
    n_now = n_max = 0

    class Slow(ServerManager):
        async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
            nonlocal n_now, n_max
            n_now, n_max = n_now + 1, max(n_max, n_now + 1)
            await asyncio.sleep(0.01)
            n_now -= 1
            return await super().generate(*args, **kwargs)

    manager = Slow([tool_call("finish", answer="Paris")])
    loops = [loop(tmp_path, manager, dispatcher={"max_parallel_agents": 2}) for _ in range(6)]
    outputs = await asyncio.gather(*map(play, loops))
    assert [output.reward_score for output in outputs] == [1.0] * 6
    assert n_max == 2


async def test_an_invalid_trajectory_is_masked(tmp_path: Path) -> None:
    output = await play(loop(tmp_path, ServerManager([tool_call("finish", answer="Paris")])), data_source="unknown")
    assert output.reward_score == 0.0
    assert not any(output.response_mask)
    assert output.extra_fields == {"stop_reason": "error_evaluation"}


async def test_a_rewritten_history_is_refused(tmp_path: Path) -> None:
    replies = [tool_call("next_with_summary", summary="x"), tool_call("finish", answer="Paris")]
    settings = {"task": "skyrl_agent.tasks.memagent.MemAgentTask", "tools": ["finish", "next_with_summary"]}
    context = "Document 1: " + "a " * 9000
    with pytest.raises(EnvError, match="the agent rewrote its history, and verl takes one row"):
        await play(loop(tmp_path, ServerManager(replies), **settings), context=context)


def test_a_task_file_for_another_backend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="infer_backend=skyrl-train must be verl"):
        loop(tmp_path, ServerManager([]), generator={})
