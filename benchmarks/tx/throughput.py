"""`make bench-tx`: compare training and sampling through the Tinker client with peft and transformers.

The script starts a server with default settings on a small random Qwen3 and runs each workload several times,
alternating between the server and peft. It writes `throughput.md` and `throughput.json` next to this file.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import tinker
import torch
from harness import conditions
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
LENGTH, RANK, VOCABULARY = 128, 32, 1024
PROMPT, NEW = 16, 64
MAX_ADAPTERS = 8
IDLE = 32
SHAPE = Qwen3Config(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)
Player = Callable[[], object]


@dataclass(frozen=True)
class Comparison:
    """One workload for both sides, with its number of tokens and an optional time limit."""

    name: str
    n_tokens: int
    ours: Player
    theirs: Player
    goal_sec: float | None = None


def main() -> int:
    """Measure and write the results. Exit status 1 means that a goal was missed."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    rounds = arguments.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as url:
        service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")  # pragma: allowlist secret
        rows, is_reached = measure(service, Path(folder) / "model", url, rounds)
    note = conditions()
    (HERE / "throughput.json").write_text(json.dumps({"conditions": note, "rows": rows}, indent=1) + "\n")
    (HERE / "throughput.md").write_text(report(note, rows, rounds))
    print(report(note, rows, rounds))
    return 0 if is_reached else 1


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Start a server and yield its URL."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(SHAPE).save_pretrained(folder / "model")
    log = (folder / "server.log").open("w+")
    command = [sys.executable, "-m", "tx.tinker.api", "--base-model", str(folder / "model"), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--checkpoints-base", str(folder / "state")],
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
    )
    try:
        yield address(process, folder / "server.log")
    finally:
        process.terminate()
        process.wait()
        log.close()


def address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the engine and return the server's URL."""
    while process.poll() is None:
        output = log.read_text()
        found = re.search(r"http://127\.0\.0\.1:\d+", output)
        if found and "the engine serves" in output:
            return found.group()
        time.sleep(0.2)
    raise SystemExit(log.read_text())


def measure(service: tinker.ServiceClient, model: Path, url: str, rounds: int) -> tuple[list[dict[str, object]], bool]:
    """Return the rows of the table, and True if all goals are reached."""
    clients = [service.create_lora_training_client(str(model), rank=RANK, seed=i).result() for i in range(MAX_ADAPTERS)]
    theirs = peft_model(model)
    work = [*training(clients, theirs), *sampling(clients, theirs)]
    for workload in work:  # compiles
        workload.ours()
        workload.theirs()
    n_programs = programs(url)
    rows = [row(workload, *alternate(workload, rounds)) for workload in work]
    rows += idle(service, str(model), work, rounds)
    n_recompiled = programs(url) - n_programs
    rows.append({"work": f"programs compiled after the warm-up: {n_recompiled}"})
    return rows, n_recompiled == 0 and all(row.get("reached", True) for row in rows)


def training(clients: list[tinker.TrainingClient], theirs: PeftModel) -> list[Comparison]:
    """Return the workloads of `forward_backward` and `optim_step` with several concurrent adapters.

    The goals are half of 0.60 s and 1.69 s.
    """
    goals = {(1, 16): 0.30, (4, 16): 0.845}
    return [
        Comparison(
            f"train {n} × {rows} × {LENGTH}",
            n * rows * LENGTH,
            partial(train_ours, clients[:n], data(rows)),
            partial(train_theirs, theirs, n, *(torch.from_numpy(array).long() for array in random_tokens(rows))),
            goals.get((n, rows)),
        )
        for n, rows in ((1, 16), (4, 4), (4, 16), (8, 16))
    ]


def sampling(clients: list[tinker.TrainingClient], theirs: PeftModel) -> list[Comparison]:
    """Return the workloads that sample `NEW` tokens, with concurrent requests of several adapters.

    The goals are twice 3,237 and 1,472 tokens per second.
    """
    samplers = [client.save_weights_and_get_sampling_client().result() for client in clients]
    goals = {(1, 1, 16): 1024 / (2 * 3237), (1, 16, 1): 1024 / (2 * 1472)}
    return [
        Comparison(
            f"sample {n} × {requests} requests × {samples} × {NEW}",
            n * requests * samples * NEW,
            partial(sample_ours, samplers[:n], requests, samples),
            partial(sample_theirs, theirs, n, requests * samples),
            goals.get((n, requests, samples)),
        )
        for n, requests, samples in ((1, 1, 16), (1, 16, 1), (4, 1, 16), (8, 1, 16))
    ]


def idle(service: tinker.ServiceClient, model: str, work: list[Comparison], rounds: int) -> list[dict[str, object]]:
    """Repeat the first training and the first sampling workload with additional idle adapters."""
    for i in range(IDLE):
        service.create_lora_training_client(model, rank=RANK, seed=i).result()
    repeated = [work[0], next(workload for workload in work if workload.name.startswith("sample"))]
    return [row(workload, *alternate(workload, rounds), suffix=f", with {IDLE} idle adapters") for workload in repeated]


def train_ours(clients: list[tinker.TrainingClient], batch: list[tinker.Datum]) -> None:
    """Make one training step per client."""
    passes = [client.forward_backward(batch, "cross_entropy") for client in clients]
    steps = [client.optim_step(tinker.AdamParams(learning_rate=1e-4)) for client in clients]
    for future in (*passes, *steps):
        future.result()


def train_theirs(model: PeftModel, n_adapters: int, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    """Make one training step per adapter, one after the other."""
    for i in range(n_adapters):
        model.set_adapter(str(i))
        parameters = [
            parameter
            for name, parameter in model.named_parameters()
            if f".lora_A.{i}." in name or f".lora_B.{i}." in name
        ]
        optimizer = model.optimizers.setdefault(i, torch.optim.AdamW(parameters, lr=1e-4))
        logits = model(tokens).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()


def sample_ours(samplers: list[tinker.SamplingClient], n_requests: int, n_samples: int) -> None:
    """Send all requests concurrently and wait for the samples."""
    params = tinker.SamplingParams(max_tokens=NEW, stop=[])
    prompt = tinker.ModelInput.from_ints(list(range(PROMPT)))
    futures = [sampler.sample(prompt, n_samples, params) for sampler in samplers for _ in range(n_requests)]
    for future in futures:
        assert all(len(sequence.tokens) == NEW for sequence in future.result().sequences)


@torch.inference_mode()
def sample_theirs(model: PeftModel, n_adapters: int, n_samples: int) -> None:
    """Sample one batch per adapter, one after the other."""
    tokens = torch.arange(PROMPT).repeat(n_samples, 1)
    for i in range(n_adapters):
        model.set_adapter(str(i))
        model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            top_k=0,
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            pad_token_id=0,
        )


def peft_model(folder: Path) -> PeftModel:
    """Return a model with adapters for the same matrices as ours."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    config = LoraConfig(r=RANK, lora_alpha=32, target_modules=names)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config, adapter_name="0")
    for i in range(1, MAX_ADAPTERS):
        model.add_adapter(str(i), config)
    model.optimizers = {}
    return model


def data(rows: int) -> list[tinker.Datum]:
    """Return random sequences with random targets."""
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens.tolist()),
            loss_fn_inputs={"target_tokens": targets, "weights": np.ones(LENGTH, np.float32)},
        )
        for tokens, targets in zip(*random_tokens(rows), strict=True)
    ]


def random_tokens(rows: int) -> np.ndarray:
    """Return tokens and targets (2, rows, LENGTH)."""
    return np.random.default_rng(0).integers(0, VOCABULARY, (2, rows, LENGTH))


def alternate(work: Comparison, rounds: int) -> tuple[list[float], list[float]]:
    """Measure both sides' seconds, alternating."""
    ours, theirs = [], []
    for _ in range(rounds):
        for player, seconds in ((work.ours, ours), (work.theirs, theirs)):
            started = time.perf_counter()
            player()
            seconds.append(time.perf_counter() - started)
    return ours, theirs


def row(work: Comparison, ours: list[float], theirs: list[float], suffix: str = "") -> dict[str, object]:
    """Return the medians, the median ratio of a round, and True if the best round reaches the goal."""
    mine, other = statistics.median(ours), statistics.median(theirs)
    result: dict[str, object] = {
        "work": work.name + suffix,
        "seconds": mine,
        "best": min(ours),
        "peft": other,
        "ratio": statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
        "tokens": work.n_tokens / mine,
    }
    if work.goal_sec is not None:
        result |= {"goal": work.goal_sec, "reached": min(ours) <= work.goal_sec}
    return result


def programs(url: str) -> int:
    """Return the number of programs that the engine has compiled."""
    time.sleep(2.0)  # the engine publishes its metrics once a second
    metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    found = re.search(r'^tx_engine\{of="programs compiled"\} (\S+)$', metrics, re.MULTILINE)
    assert found, metrics
    return int(float(found.group(1)))


def report(note: str, rows: list[dict[str, object]], rounds: int) -> str:
    """Format the results as a Markdown page."""
    lines = [
        "# Throughput of the server",
        "",
        f"`make bench-tx`, {rounds} rounds, {note}.",
        "",
        f"A random Qwen3 with {SHAPE.num_hidden_layers} layers and hidden size {SHAPE.hidden_size}, a vocabulary of "
        f"{VOCABULARY}, adapters of rank {RANK}. Our server is measured at the client, including HTTP and the "
        "database. peft and transformers run in the measuring process. Rows read `train adapters × sequences × "
        "tokens` and `sample adapters × requests × samples × tokens`. `seconds` is our median and `best` our "
        "fastest round. The ratio is the median, over the rounds, of peft's time divided by ours. A goal is "
        "reached (✓) if `best` is at most half of the time that the original SkyRL server took for the same work "
        "on two cores, with five adapter slots for four adapters.",
        "",
        "| work | seconds | tokens/s | peft, seconds | ratio | goal, seconds | best |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in rows:
        if "seconds" not in entry:
            continue
        goal = f"{entry['goal']:.2f} {'✓' if entry['reached'] else '✗'}" if "goal" in entry else ""
        lines.append(
            f"| {entry['work']} | {entry['seconds']:.2f} | {entry['tokens']:,.0f} | {entry['peft']:.2f} "
            f"| {entry['ratio']:.2f} | {goal} | {entry['best']:.2f} |"
        )
    lines += ["", *(f"{str(entry['work']).capitalize()}." for entry in rows if "seconds" not in entry), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
