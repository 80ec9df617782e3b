"""Benchmarks played by a model behind an OpenAI-compatible API."""

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from skyrl_gym.chat_endpoint import ChatEndpoint, EndpointConfig, EndpointError
from skyrl_gym.checkup.rows import split_row
from skyrl_gym.envs.registration import make
from skyrl_gym.error import InvalidSettings
from skyrl_gym.runtime.text import describe_error


def play_benchmarks(
    rows: Iterable[Mapping[str, Any]], config: EndpointConfig, n_samples: int, max_concurrency: int, path: Path
) -> Iterator[dict[str, Any]]:
    """Play each row `n_samples` times, and yield the samples in order. Each is appended to the file `path` at once.

    Samples that are in the file are not played again, unless they failed. A sample has the fields that
    `score_benchmarks` reads, and the `messages`. If the API gives no reply, or the environment fails, `error` says why.

    Raises:
        InvalidSettings: the file's samples are of another model or have other settings.
    """
    known = _open(path, {"model": config.model, "base_url": config.base_url, "sampling": dict(config.sampling_params)})

    endpoint = ChatEndpoint(config, max_concurrency)

    def play(uid: str, row: Mapping[str, Any]) -> dict[str, Any]:
        if uid in known and known[uid]["error"] is None:
            return known[uid]
        sample = {"uid": uid, "data_source": row["data_source"], "is_success": False, "stop_reason": "", "error": None}
        try:
            sample |= _play(endpoint, row)
        except Exception as error:  # noqa: BLE001, the boundary of an API and of environments
            sample["error"] = str(error) if isinstance(error, EndpointError) else describe_error(error)
        return sample

    tasks = [(f"{row['data_source']}_{row['extra_info']['index']}_{n}", row) for row in rows for n in range(n_samples)]
    try:
        with ThreadPoolExecutor(max_concurrency, "eval") as pool, path.open("a", encoding="utf-8") as file:
            for sample in pool.map(lambda task: play(*task), tasks):
                if known.get(sample["uid"]) is not sample:
                    file.write(json.dumps(sample) + "\n")
                    file.flush()
                yield sample
    finally:
        endpoint.close()


def _play(endpoint: ChatEndpoint, row: Mapping[str, Any]) -> dict[str, Any]:
    prompt, extras = split_row(row)
    env = make(row["env_class"], env_config={}, extras=extras)
    try:
        messages, _ = env.init(prompt)
        total, reason = 0.0, "max_turns"
        for _ in range(extras["max_turns"]):
            reply = endpoint.complete(messages)
            output = env.step(reply.text)
            total += output["reward"] or 0.0
            messages = [*messages, {"role": "assistant", "content": reply.text}, *output["observations"]]
            if output["done"]:
                reason = reply.finish_reason or "stop"
                break
    finally:
        env.close()
    return {"is_success": total > 0, "total_reward": total, "stop_reason": reason, "messages": messages}


def _open(path: Path, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the samples of an earlier run by `uid`, or start a file, whose first line has the settings."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings) + "\n", encoding="utf-8")
    text = path.read_text("utf-8")
    if not text.endswith("\n"):  # a run was killed while it wrote
        text = text[: text.rfind("\n") + 1]
        path.write_text(text, encoding="utf-8")
    first, *lines = text.splitlines() or [""]
    if first != json.dumps(settings):
        raise InvalidSettings(
            f"{path} has samples of {first[:300] or 'nothing'}, not of {json.dumps(settings)}; set --output to another "
            "file, or remove it"
        )
    return {sample["uid"]: sample for sample in map(json.loads, lines)}
