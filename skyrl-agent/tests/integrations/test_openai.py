from typing import Any

import pytest
from agent_kit.engines import TOKENIZER, tool_call
from agent_kit.trajectories import ROW
from gym_kit.http_server import Request, serving

from skyrl_agent import AgentConfig, AutoAgentRunner
from skyrl_train.errors import ConfigError


def config(url: str, **settings: Any) -> AgentConfig:
    backend = {"model_name": "m", "api_url": url, "model_max_len": 100_000}
    return AgentConfig.model_validate(
        {
            "task": "skyrl_agent.tasks.general_react.GeneralReactTask",
            "tools": ("finish",),
            "generator": {
                "infer_backend": "openai_server",
                "backend_config": backend,
                "num_trajectories": 1,
                "sampling_params": {"temperature": 0.7, "top_k": 20, "max_tokens": 64},
                **settings,
            },
        }
    )


@pytest.mark.parametrize("returns_tokens", [True, False])
async def test_the_server_continues_tokens(returns_tokens: bool) -> None:
    replies = [tool_call("finish"), tool_call("finish", answer="Paris")]

    def answer(request: Request) -> tuple[int, Any]:
        assert request.path == "/v1/completions"
        text = replies[len(requests) - 1]
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "text": text, "logprobs": None}
        if returns_tokens:
            choice["token_ids"] = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
        return 200, {"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}

    with serving(answer) as (url, requests):
        runner = AutoAgentRunner.from_task(config(f"{url}/v1"), None, TOKENIZER)
        output = await runner.run([ROW])
        await runner.close()
    assert output["traj_rewards"] == [1.0]
    assert output["rollout_logprobs"] is None
    first, second = requests
    assert (first.body["model"], first.body["temperature"], first.body["top_k"]) == ("m", 0.7, 20)
    assert (
        second.body["prompt"]
        == output["prompt_token_ids"][0] + output["response_ids"][0][: -len(TOKENIZER(replies[1])["input_ids"]) - 1]
    )


async def test_a_server_that_fails_makes_the_trajectory_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda request: (400, {"error": {"message": "too long"}})) as (url, _):
        runner = AutoAgentRunner.from_task(config(url, n_retries=0), None, TOKENIZER)
        output = await runner.run([ROW])
        await runner.close()
    assert output["traj_rewards"] == [None]
    assert output["stop_reasons"] == ["engine_error"]


def test_engines_must_be_of_the_backend() -> None:
    with pytest.raises(ConfigError, match="samples with the server in backend_config; pass infer_engine=None"):
        AutoAgentRunner.from_task(config("http://x"), object(), TOKENIZER)
