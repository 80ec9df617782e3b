"""`make bench-sync-dtypes`: send the weights of a policy in float32 as they are, and in bfloat16 as to vLLM on a GPU.

Random tensors in the shape of a small Llama 3.2 go through shared memory and through gloo, with checksums, into tensors
of a receiver in another process. The contenders take turns in one run. The script writes `dtypes.md` next to this file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from harness import conditions
from transports import model_shapes, receive_once

from skyrl_train.types.specs import TensorSpec
from skyrl_train.weight_sync import SyncPlan, send
from skyrl_train.weight_sync.base import Transport
from skyrl_train.weight_sync.sync import free_port

HERE = Path(__file__).parent
Specs = tuple[TensorSpec, ...]
CONTENDERS: dict[str, tuple[Transport, torch.dtype]] = {
    "shared memory, float32": ("shared_memory", torch.float32),
    "shared memory, bfloat16": ("shared_memory", torch.bfloat16),
    "gloo, float32": ("gloo", torch.float32),
    "gloo, bfloat16": ("gloo", torch.bfloat16),
}


def main() -> int:
    """Measure and write the results."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--vocabulary", type=int, default=32_000)
    options = arguments.parse_args()
    load = os.getloadavg()[0]
    shapes = model_shapes(options.layers, options.vocabulary)
    samples = measure(shapes, options.rounds)
    n_parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    text = report(samples, n_parameters, load)
    print(text)
    (HERE / "dtypes.md").write_text(text)
    return 0


def specs_in(dtype: torch.dtype, shapes: dict[str, tuple[int, ...]]) -> Specs:
    return tuple(TensorSpec(name, shape, dtype) for name, shape in shapes.items())


def measure(shapes: dict[str, tuple[int, ...]], n_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each sync, from its start to the last value in the receiver's tensors."""
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    samples: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, shapes), daemon=True)
    process.start()
    try:
        ours.recv()
        for round_index in range(n_rounds + 1):  # the first one touches the memory
            for name, (transport, dtype) in CONTENDERS.items():
                plan = SyncPlan(round_index, transport, f"127.0.0.1:{free_port()}", (specs_in(dtype, shapes),))
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


def receive(connection: Connection, shapes: dict[str, tuple[int, ...]]) -> None:
    """Receive by every plan, into tensors of its type."""
    own = {
        dtype: {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        for dtype in {dtype for _, dtype in CONTENDERS.values()}
    }
    connection.send("ready")
    while (plan := connection.recv()) is not None:
        connection.send(receive_once(plan, own[plan.specs[0].dtype]))


def report(samples: dict[str, list[float]], n_parameters: int, load: float) -> str:
    """Return the page."""
    rows = []
    for name, (_, dtype) in CONTENDERS.items():
        median = statistics.median(samples[name])
        whole = statistics.median(samples[name.replace("bfloat16", "float32")])
        gigabytes = n_parameters * dtype.itemsize / 1e9
        spread = f"{min(samples[name]):.2f} to {max(samples[name]):.2f}"
        rows.append(f"| {name} | {gigabytes:.2f} | {median:.2f} ({spread}) | {median / whole:.2f} |")
    n_rounds = len(next(iter(samples.values())))
    return "\n".join(
        [
            "# Weight sync of a policy in float32",
            "",
            f"`make bench-sync-dtypes`, {n_rounds} rounds; {conditions()}; load before: {load:.1f}.",
            "",
            f"{n_parameters / 1e6:.0f} million random values in float32, with checksums, from the tensors of one "
            "process to those of another one on the same machine. In bfloat16, the sender rounds them, as for vLLM on "
            "a GPU. The last column is relative to float32.",
            "",
            "| sent | GB | seconds: median (range) | relative |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
