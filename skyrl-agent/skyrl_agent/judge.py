"""A language model as a judge of answers, behind an OpenAI-compatible API."""

import os
import threading
from functools import cache

from skyrl_gym.chat_endpoint import ChatEndpoint, EndpointConfig, EndpointError
from skyrl_gym.error import ToolFailure
from skyrl_gym.judges import CORRECTNESS, Judge
from skyrl_gym.judges.judge import JudgeSettings
from skyrl_train.errors import EnvError

DEFAULT_URL = "https://api.openai.com/v1"
N_ATTEMPTS = 5
MAX_CONCURRENCY = 16

_slots = threading.BoundedSemaphore(MAX_CONCURRENCY)


def _settings(model: str) -> JudgeSettings:
    """Return a model at OPENAI_BASE_URL, with the key OPENAI_API_KEY."""
    if not os.environ.get("OPENAI_API_KEY"):
        raise ToolFailure("the judge needs OPENAI_API_KEY, and OPENAI_BASE_URL for another API")
    return JudgeSettings(
        model=model,
        base_url=os.environ.get("OPENAI_BASE_URL") or DEFAULT_URL,
        api_key_env="OPENAI_API_KEY",  # pragma: allowlist secret
        n_attempts=N_ATTEMPTS,
    )


@cache
def _judge(settings: str) -> Judge:
    """Return the process's judge with these settings as JSON, so that all answers share its cache and limits."""
    return Judge(JudgeSettings.model_validate_json(settings))


def complete(model: str, prompt: str) -> str:
    """Return a model's answer to a prompt. Raises ToolFailure if the API fails. Blocks."""
    settings = _settings(model)
    config = EndpointConfig(
        settings.base_url, model, settings.api_key_env, settings.sampling_params, n_attempts=settings.n_attempts
    )
    endpoint = ChatEndpoint(config)
    try:
        with _slots:
            return endpoint([{"role": "user", "content": prompt}])
    except EndpointError as error:
        raise ToolFailure(f"the model {model} failed: {error}") from error
    finally:
        endpoint.close()


def judge_answer(question: str, answer: str, response: str) -> float:
    """Return 1.0 if the model JUDGE_MODEL finds the response correct, else 0.0. Blocks.

    Raises:
        ToolFailure: JUDGE_MODEL or OPENAI_API_KEY is not set.
        EnvError: the model gives no verdict, or the API fails.
    """
    if not response.strip():
        return 0.0
    model = os.environ.get("JUDGE_MODEL")
    if not model:
        raise ToolFailure("answers of this data source are judged by a model; set JUDGE_MODEL to its name")
    judgement = _judge(_settings(model).model_dump_json()).judge(CORRECTNESS, question, response, answer)
    if judgement.score is None:
        raise EnvError(f"the reward is unknown: {judgement.problem}")
    return judgement.score
