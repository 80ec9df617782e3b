"""`python benchmarks/gpu/run.py`: the update and the embedded engine on one GPU, in less than ten minutes.

Needs torch, transformers and the three packages of this repository, but no network: the model is a Qwen3 with 0.6
billion random weights. `--tiny` runs the same code with a small model, even without a GPU. If TRL is installed, it
trains on the same prompts with the same numbers of samples and tokens. The script writes `results.md` next to this
file.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "training"), str(HERE.parents[1] / "skyrl-train")]

import torch  # noqa: E402
from harness import Contender, alternate, conditions  # noqa: E402
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from skyrl_train.inference_engines.base import EngineRequest, SamplingParams  # noqa: E402
from skyrl_train.inference_engines.hf import PackedEngine  # noqa: E402
from skyrl_train.models.fused import fuse_operations  # noqa: E402
from skyrl_train.models.loading import autocast  # noqa: E402
from skyrl_train.models.scoring_module import ScoringModule  # noqa: E402
from skyrl_train.types import TrainingBatch  # noqa: E402
from skyrl_train.workers.split import split  # noqa: E402

QWEN3_600M = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
TINY = Qwen3Config(
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""Dense bfloat16 operations per second, by GPU name. Source: NVIDIA's data sheets."""


class NoTokenizer:
    """A tokenizer for runs that decode nothing."""

    eos_token_id = None


def make_model(config: Qwen3Config, device: torch.device) -> PreTrainedModel:
    """Return a model with random weights in float32, with operations fused as in a run."""
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    fuse_operations(model)
    return model


def median_seconds(function: Callable[[], object], device: torch.device, n_times: int = 5) -> float:
    """Return the median seconds of a call, after one warm-up call."""
    seconds = []
    for repetition in range(n_times + 1):
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repetition >= 1:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure_update(config: Qwen3Config, device: torch.device, n_prompts: int, n_samples: int, n_tokens: int) -> str:
    """Measure an update in bfloat16: forward and backward pass of all rows, and AdamW."""
    model = make_model(config, device)
    module = ScoringModule(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)
    rng = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 500, (n_prompts, n_tokens), generator=rng).repeat_interleave(n_samples, dim=0)
    sequences = torch.cat([prompts, torch.randint(10, 500, prompts.shape, generator=rng)], dim=1)
    draws = torch.arange(n_prompts).repeat_interleave(n_samples)
    batch = TrainingBatch(sequences, torch.ones_like(sequences), torch.ones_like(prompts).float(), draws)
    max_tokens = 16_384 if device.type == "cuda" else 4096
    (shard,), _ = split(batch, 1, max_tokens, shares_prefixes=module.shares_prefixes)

    def update() -> None:
        for rows in shard.micro_batches:
            with autocast(device, bf16=True):
                scores = module(shard.rows.select(rows).to(device))
            scores.logprobs.mean().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = median_seconds(update, device)
    head = model.get_output_embeddings().weight.numel()
    body = model.num_parameters() - head  # the embeddings are tied to the head
    layers, width = config.num_hidden_layers, config.num_attention_heads * config.head_dim
    attention = 12 * layers * width * sequences.shape[1] * sequences.numel() / 2  # causal
    flops = 6 * (body * sequences.numel() + head * prompts.numel()) + attention
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = next((rate for key, rate in PEAK_FLOPS.items() if key in name), None)
    mfu = f", {flops / seconds / peak:.0%} of the GPU's peak (MFU, every token of every row counted)" if peak else ""
    rate = f"{sequences.numel() / seconds:,.0f} tokens/s, {flops / seconds / 1e12:.1f} TFlop/s"
    memory = f", {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB" if device.type == "cuda" else ""
    return f"update of {len(batch)} rows of {sequences.shape[1]} tokens: {seconds:.2f} s, {rate}{mfu}{memory}"


def measure_engine(config: Qwen3Config, device: torch.device, n_prompts: int, n_samples: int, n_new: int) -> str:
    """Measure the embedded engine in bfloat16."""
    rng = random.Random(0)
    prompts = [[rng.randint(10, 500) for _ in range(256)] for _ in range(n_prompts)]
    sampling = SamplingParams(max_new_tokens=n_new, ignore_eos=True)
    requests = [EngineRequest(prompts[i // n_samples], sampling, i) for i in range(n_prompts * n_samples)]
    with ThreadPoolExecutor(1) as executor, asyncio.Runner() as runner:
        engine = PackedEngine(
            make_model(config, device),
            NoTokenizer(),
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            max_cache_bytes=(32 if device.type == "cuda" else 1) << 30,
            bf16=True,
            executor=executor,
        )

        async def generate() -> None:
            await engine.generate(requests)
            await engine.sleep()
            await engine.wake_up()

        seconds = median_seconds(lambda: runner.run(generate()), device, n_times=3)
        runner.run(engine.close())
    rate = f"{len(requests) * n_new / seconds:,.0f} tokens/s"
    return f"generation of {len(requests)} × {n_new} tokens: {seconds:.2f} s, {rate}"


def compare_with_trl(n_times: int) -> str:
    """Compare whole GRPO steps of the workload `w3` with TRL."""
    if find_spec("trl") is None:
        return "training steps against TRL: TRL is not installed"
    from compare import VARIABLES
    from workloads import WORKLOADS, write_inputs

    workload, children = WORKLOADS["w3"], HERE.parent / "training"
    with tempfile.TemporaryDirectory() as name:
        write_inputs(workload, Path(name))
        commands = {side: [sys.executable, children / f"{side}_child.py", "w3", name] for side in ("skyrl", "trl")}
        with (
            Contender.running("skyrl", commands["skyrl"], VARIABLES) as ours,
            Contender.running("trl", commands["trl"], VARIABLES) as theirs,
        ):
            alternate([ours, theirs], n_times)
    ratio = theirs.median() / ours.median()
    return f"training step `w3`: SkyRL {ours.spread()} s, TRL {theirs.spread()} s, ratio {ratio:.1f}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small model, and no results file")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        sys.exit("there is no GPU here; --tiny runs the same code with a small model on the CPU")
    config = TINY if options.tiny else QWEN3_600M
    sizes = (2, 2, 32) if options.tiny else (16, 8, 512)
    measurements = (
        lambda: measure_update(config, device, *sizes),
        lambda: compare_with_trl(n_times=2 if options.tiny else 5),
        lambda: measure_engine(config, device, *sizes),
    )
    lines = []
    for measure in measurements:
        lines.append(f"- {measure()}")
        print(lines[-1], flush=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    page = f"# One GPU\n\n`python benchmarks/gpu/run.py`, {name}, {conditions()}.\n\n" + "\n".join(lines) + "\n"
    if not options.tiny:
        (HERE / "results.md").write_text(page)


if __name__ == "__main__":
    main()
