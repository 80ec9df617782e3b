"""`make bench-sync-dtypes`: send a policy's float32 weights as they are, and in bfloat16 as to vLLM on a GPU.

Random tensors in the shape of a small Llama 3.2 go through shared memory and through gloo, with checksums, into a
receiver's tensors in a second process. The contenders take turns in one run. The script writes `dtypes.md` next to this
file.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

import torch
from harness import conditions
from transports import measure, model_shapes, specs_in

from skyrl_train.weight_sync import SyncPlan
from skyrl_train.weight_sync.base import Transport

HERE = Path(__file__).parent
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
    contenders = {
        name: SyncPlan(0, transport, "", specs_in(dtype, shapes)) for name, (transport, dtype) in CONTENDERS.items()
    }
    samples = measure({name: torch.randn(shape) for name, shape in shapes.items()}, contenders, options.rounds)
    n_parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    text = report(samples, n_parameters, load)
    print(text)
    (HERE / "dtypes.md").write_text(text)
    return 0


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
            f"`make bench-sync-dtypes`, {n_rounds} rounds, {conditions()}. Load before: {load:.1f}.",
            "",
            f"{n_parameters / 1e6:.0f} million random values in float32, with checksums, are sent between the tensors "
            "of two processes on one machine. In bfloat16, the sender rounds them, as for vLLM on a GPU. The last "
            "column is relative to float32.",
            "",
            "| sent | GB | seconds: median (range) | relative |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
