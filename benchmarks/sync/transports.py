"""`make bench-sync`: send the weights of a model in the shape of Llama 3.2 1B to a second process on this machine.

Random tensors in bfloat16 go through shared memory and through gloo, with and without checksums, into the receiver's
tensors. The transports take turns in one run. The script writes `results.md` and `results.json` next to this file.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from harness import conditions, copy_rate

from skyrl_train.types.specs import TensorSpec
from skyrl_train.weight_sync import Receiver, SyncPlan, send
from skyrl_train.weight_sync.base import Transport
from skyrl_train.weight_sync.sync import free_port

HERE = Path(__file__).parent
HIDDEN, MIDDLE, LAYERS, KV, VOCAB = 2048, 8192, 16, 512, 128_256
LAYER = {
    "q": (HIDDEN, HIDDEN),
    "k": (KV, HIDDEN),
    "v": (KV, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate": (MIDDLE, HIDDEN),
    "up": (MIDDLE, HIDDEN),
    "down": (HIDDEN, MIDDLE),
    "norm_1": (HIDDEN,),
    "norm_2": (HIDDEN,),
}
CONTENDERS: dict[str, tuple[Transport, bool]] = {
    "shared memory": ("shared_memory", False),
    "shared memory, checksums": ("shared_memory", True),
    "gloo": ("gloo", False),
    "gloo, checksums": ("gloo", True),
}
TARGET = 0.6  # of the copy rate


def main() -> int:
    """Measure and write the results. Fail if shared memory is below its target."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--layers", type=int, default=LAYERS)
    arguments.add_argument("--vocabulary", type=int, default=VOCAB)
    arguments.add_argument("--dry-run", action="store_true", help="print the results only")
    options = arguments.parse_args()
    load = os.getloadavg()[0]
    shapes = model_shapes(options.layers, options.vocabulary)
    specs = specs_in(torch.bfloat16, shapes)
    n_bytes = sum(spec.n_bytes for spec in specs)
    rate = copy_rate()
    random = torch.randn(1 << 24).bfloat16()
    tensors = {spec.name: random.repeat(-(-spec.n_bytes // random.nbytes))[: spec.n_bytes // 2] for spec in specs}
    tensors = {spec.name: tensors[spec.name].view(spec.shape).contiguous() for spec in specs}
    contenders = {
        name: SyncPlan(0, transport, "", specs, timeout_s=120.0, has_checksum=has_checksum)
        for name, (transport, has_checksum) in CONTENDERS.items()
    }
    samples = measure(tensors, contenders, options.rounds)
    results: dict[str, Any] = {
        "conditions": conditions(),
        "load_before": load,
        "rounds": options.rounds,
        "bytes": n_bytes,
        "copy_bytes_per_second": rate,
        "seconds": samples,
        "peak_bytes_of_sender": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    text = report(results)
    print(text)
    if not options.dry_run:
        (HERE / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        (HERE / "results.md").write_text(text)
    return 0 if fraction(results, "shared memory") >= TARGET else 1


def model_shapes(n_layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return the model's tensors."""
    shapes: dict[str, tuple[int, ...]] = {"embeddings": (vocabulary, HIDDEN)}
    for layer in range(n_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in LAYER.items()}
    return shapes


def specs_in(dtype: torch.dtype, shapes: dict[str, tuple[int, ...]]) -> tuple[TensorSpec, ...]:
    """Return the model's tensors in a dtype."""
    return tuple(TensorSpec(name, shape, dtype) for name, shape in shapes.items())


def measure(tensors: dict[str, torch.Tensor], contenders: dict[str, SyncPlan], n_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each sync, from its start to the last value in the receiver's tensors."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    try:
        ours.recv()
        for round_index in range(n_rounds + 1):  # the first round allocates and touches the memory
            for name, contender in contenders.items():
                plan = replace(contender, version=round_index, address=f"127.0.0.1:{free_port()}")
                started = time.perf_counter()
                ours.send(plan)
                sent = send(plan, iter(tensors.items()))
                received = ours.recv()
                if round_index:
                    samples[name].append(time.perf_counter() - started)
                assert received == sent, f"{received} instead of {sent}"
        ours.send(None)
        process.join(timeout=30)
    finally:
        process.kill()
    return samples


def receive(connection: Connection) -> None:
    """Receive according to every plan, into the same tensors for each dtype."""
    own: dict[torch.dtype, dict[str, torch.Tensor]] = {}
    connection.send("ready")
    while (plan := connection.recv()) is not None:
        dtype = plan.specs[0].dtype
        if dtype not in own:
            own[dtype] = {spec.name: torch.zeros(spec.shape, dtype=dtype) for spec in plan.specs}
        receiver = Receiver(replace(plan, rank=1), own[dtype])
        for _ in receiver:
            pass
        connection.send(receiver.receipt)


def fraction(results: dict[str, Any], name: str) -> float:
    """Return the rate at which both ends read and write, as a fraction of the copy rate."""
    traffic = 4 * results["bytes"]  # each end reads and writes all bytes
    return traffic / statistics.median(results["seconds"][name]) / results["copy_bytes_per_second"]


def report(results: dict[str, Any]) -> str:
    """Return the page."""
    rate, n_bytes = results["copy_bytes_per_second"], results["bytes"]
    rows = []
    for name, seconds in results["seconds"].items():
        median = statistics.median(seconds)
        rows.append(
            f"| {name} | {median:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {n_bytes / median / 1e9:.2f} | "
            f"{100 * fraction(results, name):.0f}% |"
        )
    return "\n".join(
        [
            "# Weight sync between two processes",
            "",
            f"`make bench-sync`, {results['rounds']} rounds, {results['conditions']}. Load before: "
            f"{results['load_before']:.1f}.",
            "",
            f"{n_bytes / 1e9:.2f} GB of random bfloat16 values in the shape of Llama 3.2 1B are sent between the "
            "tensors of two processes on one machine. A large copy within one process reads and writes a total of "
            f"{rate / 1e9:.1f} GB/s with all threads. A sync reads and writes every byte twice, once at each end. The "
            "last column is its traffic as a fraction of the copy rate.",
            "",
            "| transport | seconds: median (range) | weights, GB/s | traffic, of the copy rate |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
