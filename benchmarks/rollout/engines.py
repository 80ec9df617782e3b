"""`make bench-rollout`: tokens per second of the embedded engines, `transformers.generate` and, if installed, vLLM.

The engines take turns and run every workload several times. The script writes `engines.md` and `engines.json` next to
this file. vLLM runs in `.venv-vllm` (see `make test-vllm`), behind the same interface as the embedded engine.
"""

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
from harness import conditions
from transformers import PreTrainedModel
from workloads import Conversation, Workload, workloads

from skyrl_train.inference_engines.base import EngineRequest, InferenceEngine, SamplingParams
from skyrl_train.inference_engines.hf import GeneralEngine, PackedEngine

HERE = Path(__file__).parent
VLLM_PYTHON = HERE.parents[1] / ".venv-vllm/bin/python"
Runner = Callable[[], float]
"""Runs a workload once and returns the seconds."""


class NoTokenizer:
    """A tokenizer for runs that decode nothing."""

    eos_token_id = None


def generate_runner(model: PreTrainedModel, conversations: list[Conversation], executor: Executor) -> Runner:
    """Use `model.generate` turn by turn, with all conversations in one left-padded batch."""

    @torch.inference_mode()
    def run() -> float:
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

    return lambda: executor.submit(run).result()


def engine_runner(
    engine: InferenceEngine, conversations: list[Conversation], loop: asyncio.AbstractEventLoop
) -> Runner:
    """Run the conversations concurrently and independently."""

    async def run_conversation(index: int, conversation: Conversation) -> None:
        token_ids = list(conversation.prompt_ids)
        for n_new, observation_ids in conversation.turns:
            sampling = SamplingParams(max_new_tokens=n_new, ignore_eos=True)
            (result,) = await engine.generate([EngineRequest(token_ids, sampling, index, str(index))])
            assert len(result.token_ids) == n_new
            token_ids = token_ids + result.token_ids + observation_ids
        await engine.end_session(str(index))

    async def run_all() -> float:
        started = time.perf_counter()
        await asyncio.gather(*(run_conversation(i, conversation) for i, conversation in enumerate(conversations)))
        seconds = time.perf_counter() - started
        await engine.sleep()  # drops all caches: every repetition starts cold
        await engine.wake_up()
        return seconds

    return lambda: loop.run_until_complete(run_all())


@contextmanager
def vllm_runner(index: int, model: PreTrainedModel) -> Iterator[Runner | None]:
    """Run the workload in vLLM's environment. Yield None if that does not exist."""
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

            def run() -> float:
                stdin.write("play\n")
                stdin.flush()
                for line in stdout:
                    if line.startswith("seconds "):
                        return float(line.split()[1])
                raise RuntimeError(f"vLLM ended with exit status {process.wait()}")

            yield run
            stdin.close()


def measure(index: int, workload: Workload, n_times: int) -> dict[str, Any]:
    """Measure the seconds of all runners, alternating."""
    model, hybrid = workload.sizes.qwen3(), workload.sizes.qwen3_5()
    loop, executor = asyncio.new_event_loop(), ThreadPoolExecutor(max_workers=1)
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_cache_bytes": 1 << 31}
    # Both compute in one thread, as in a run: two computing threads would slow each other down.
    engine, padded, recurrent = (
        kind(which, NoTokenizer(), **limits, executor=executor)
        for kind, which in ((PackedEngine, model), (GeneralEngine, model), (GeneralEngine, hybrid))
    )
    with vllm_runner(index, model) as vllm:
        runners: dict[str, Runner | None] = {
            "generate": generate_runner(model, workload.conversations, executor),
            "embedded": engine_runner(engine, workload.conversations, loop),
            "padded": engine_runner(padded, workload.conversations, loop),
            "hybrid": engine_runner(recurrent, workload.conversations, loop),
            "vllm": vllm,
        }
        seconds: dict[str, list[float]] = {name: [] for name, runner in runners.items() if runner is not None}
        for repetition in range(n_times + 1):
            for name, runner in runners.items():
                if runner is not None:
                    elapsed = runner()
                    print(f"{workload.name}: {name} {workload.n_tokens / elapsed:,.0f} tokens/s", flush=True)
                    if repetition:  # the first repetition warms up
                        seconds[name].append(elapsed)
    for one in (engine, padded, recurrent):
        loop.run_until_complete(one.close())
    loop.close()
    executor.shutdown()
    return {"name": workload.name, "n_tokens": workload.n_tokens, "goal": workload.goal, "seconds": seconds}


def table(results: list[dict[str, Any]], setup: str) -> str:
    """Format the results as a Markdown page."""
    lines = [
        "# Generation throughput by engine",
        "",
        f"`make bench-rollout`, {setup}. Tokens per second, median of alternating runs with random weights "
        "at temperature 1.",
        "The model has four layers of width 256 and a vocabulary of 8,192. In the last row, it has two layers "
        "of width 128.",
        "",
        "The padded engine runs models that cannot be packed. The hybrid is a Qwen3.5 of equal size in that engine.",
        "",
        "| workload | `generate` | embedded engine | embedded / generate | goal | padded engine | embedded / padded "
        "| hybrid | embedded / hybrid | vLLM (CPU) | embedded / vLLM |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        rate = {name: result["n_tokens"] / statistics.median(elapsed) for name, elapsed in result["seconds"].items()}
        ours = rate["embedded"]
        vllm = f"{rate['vllm']:,.0f} | {ours / rate['vllm']:.2f}" if "vllm" in rate else "not installed | "
        lines.append(
            f"| {result['name']} | {rate['generate']:,.0f} | {ours:,.0f} | {ours / rate['generate']:.1f} | "
            f"{result['goal']:g} | {rate['padded']:,.0f} | {ours / rate['padded']:.1f} | "
            f"{rate['hybrid']:,.0f} | {ours / rate['hybrid']:.1f} | {vllm} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n_times", type=int, default=3)
    parser.add_argument("--only", help="run only workloads whose name contains this, and write no files")
    options = parser.parse_args()
    selected = [(i, w) for i, w in enumerate(workloads()) if not options.only or options.only in w.name]
    setup = conditions()
    results = [measure(i, workload, options.n_times) for i, workload in selected]
    if not options.only:
        (HERE / "engines.json").write_text(json.dumps({"conditions": setup, "workloads": results}, indent=1) + "\n")
        (HERE / "engines.md").write_text(table(results, setup))
    print(table(results, setup))


if __name__ == "__main__":
    sys.exit(main())
