"""`make bench-rollout`: tokens per second of the embedded engine, `transformers.generate`, and vLLM if it is there.

Every workload is played by each of them in turn, several times, in one run. Writes `engines.md` and `engines.json`
beside this file. vLLM plays in `.venv-vllm` (see `make test-vllm`), through the same interface as the embedded engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from conditions import conditions
from transformers import PreTrainedModel
from workloads import Conversation, Workload, workloads

from skyrl_train.inference_engines.base import EngineRequest, InferenceEngine, SamplingParams
from skyrl_train.inference_engines.hf import HFEngine

HERE = Path(__file__).parent
VLLM_PYTHON = HERE.parents[1] / ".venv-vllm/bin/python"
Player = Callable[[], float]
"""Plays the workload once; seconds."""


class NoTokenizer:
    """Nothing is decoded here."""

    eos_token_id = None


def generate_player(model: PreTrainedModel, conversations: list[Conversation], executor: Executor) -> Player:
    """`model.generate` as it is used: all conversations are a batch, padded on the left, turn by turn."""

    @torch.inference_mode()
    def play() -> float:
        started = time.perf_counter()
        token_ids = [list(conversation.prompt_ids) for conversation in conversations]
        for turn in range(len(conversations[0].turns)):
            n_new = [conversation.turns[turn][0] for conversation in conversations]
            length = max(map(len, token_ids))
            input_ids = torch.tensor([[0] * (length - len(ids)) + ids for ids in token_ids])
            mask = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in token_ids])
            output = model.generate(
                input_ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=max(n_new),
                pad_token_id=0,
            )
            for ids, row, n, conversation in zip(
                token_ids, output[:, length:].tolist(), n_new, conversations, strict=True
            ):
                ids += row[:n] + conversation.turns[turn][1]
        return time.perf_counter() - started

    return lambda: executor.submit(play).result()


def engine_player(
    engine: InferenceEngine, conversations: list[Conversation], loop: asyncio.AbstractEventLoop
) -> Player:
    """Every conversation at its own pace."""

    async def converse(index: int, conversation: Conversation) -> None:
        token_ids = list(conversation.prompt_ids)
        for n_new, observation_ids in conversation.turns:
            sampling = SamplingParams(max_new_tokens=n_new, ignore_eos=True)
            (result,) = await engine.generate([EngineRequest(token_ids, sampling, index, str(index))])
            assert len(result.token_ids) == n_new
            token_ids = token_ids + result.token_ids + observation_ids
        await engine.end_session(str(index))

    async def play_all() -> float:
        started = time.perf_counter()
        await asyncio.gather(*(converse(i, conversation) for i, conversation in enumerate(conversations)))
        seconds = time.perf_counter() - started
        await engine.sleep()  # drops all caches: every repetition starts cold
        await engine.wake_up()
        return seconds

    return lambda: loop.run_until_complete(play_all())


@contextmanager
def vllm_player(index: int, model: PreTrainedModel) -> Iterator[Player | None]:
    """The same workload in the environment of vLLM; None where there is none."""
    if not VLLM_PYTHON.exists():
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        command = [str(VLLM_PYTHON), str(HERE / "play_vllm.py"), str(index), folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            stdin, stdout = process.stdin, process.stdout

            def play() -> float:
                stdin.write("play\n")
                stdin.flush()
                for line in stdout:
                    if line.startswith("seconds "):
                        return float(line.split()[1])
                raise RuntimeError(f"vLLM ended with exit status {process.wait()}")

            yield play
            stdin.close()


def measure(index: int, workload: Workload, n_times: int) -> dict[str, Any]:
    """Seconds of every player, each time one after the other."""
    model = workload.model()
    loop, executor = asyncio.new_event_loop(), ThreadPoolExecutor(max_workers=1)
    engine = HFEngine(
        model,
        NoTokenizer(),
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_cache_bytes=1 << 31,
        executor=executor,  # as in a run: two threads that compute would slow each other down
    )
    with vllm_player(index, model) as vllm:
        players: dict[str, Player | None] = {
            "generate": generate_player(model, workload.conversations, executor),
            "embedded": engine_player(engine, workload.conversations, loop),
            "vllm": vllm,
        }
        seconds: dict[str, list[float]] = {name: [] for name, player in players.items() if player is not None}
        for repetition in range(n_times + 1):
            for name, player in players.items():
                if player is not None:
                    taken = player()
                    print(f"{workload.name}: {name} {workload.n_tokens / taken:,.0f} tokens/s", flush=True)
                    if repetition:  # the first one warms up
                        seconds[name].append(taken)
    loop.run_until_complete(engine.close())
    loop.close()
    executor.shutdown()
    return {"name": workload.name, "n_tokens": workload.n_tokens, "goal": workload.goal, "seconds": seconds}


def table(results: list[dict[str, Any]], where: str) -> str:
    """The page that people read."""
    lines = [
        "# Generating, by engine",
        "",
        f"`make bench-rollout`, {where}. Tokens per second, median of alternating runs; random weights, temperature 1.",
        "Four layers of 256 with 8,192 tokens, but for the last row: two layers of 128.",
        "",
        "| workload | `generate` | embedded engine | times generate | goal | vLLM (CPU) | embedded times vLLM |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        rate = {name: result["n_tokens"] / statistics.median(taken) for name, taken in result["seconds"].items()}
        ours = rate["embedded"]
        vllm = f"{rate['vllm']:,.0f} | {ours / rate['vllm']:.2f}" if "vllm" in rate else "not installed | "
        lines.append(
            f"| {result['name']} | {rate['generate']:,.0f} | {ours:,.0f} | {ours / rate['generate']:.1f} | "
            f"{result['goal']:g} | {vllm} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n_times", type=int, default=3)
    parser.add_argument("--only", help="part of a workload's name; writes no files")
    options = parser.parse_args()
    chosen = [(i, w) for i, w in enumerate(workloads()) if not options.only or options.only in w.name]
    where = conditions()
    results = [measure(i, workload, options.n_times) for i, workload in chosen]
    if not options.only:
        (HERE / "engines.json").write_text(json.dumps({"conditions": where, "workloads": results}, indent=1) + "\n")
        (HERE / "engines.md").write_text(table(results, where))
    print(table(results, where))


if __name__ == "__main__":
    sys.exit(main())
