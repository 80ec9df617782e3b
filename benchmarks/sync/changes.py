"""`make bench-changes`: count the bytes of weight syncs that send only changed values, or only an adapter.

AdamW trains a random model in the shape of Qwen3-0.6B on random gradients. After each step, the weights are sent in
bfloat16 to a second process on this machine. It keeps a mirror of them, as vLLM engines do. The script writes
`changes.md` and `changes.json` next to this file.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from harness import conditions

from skyrl_train.models.low_rank import LEFT, RIGHT, is_factor
from skyrl_train.types.specs import SyncKind, TensorSpec
from skyrl_train.weight_sync import MirroredReceiver, SyncPlan, WeightMirror, send
from skyrl_train.weight_sync.sync import free_port
from skyrl_train.weight_sync.transfer import SentWeights

HERE = Path(__file__).parent
HIDDEN, MIDDLE, LAYERS, QUERIES, KEYS, VOCAB = 1024, 3072, 28, 2048, 1024, 151_936
LAYER = {
    "q": (QUERIES, HIDDEN),
    "k": (KEYS, HIDDEN),
    "v": (KEYS, HIDDEN),
    "o": (HIDDEN, QUERIES),
    "gate": (MIDDLE, HIDDEN),
    "up": (MIDDLE, HIDDEN),
    "down": (HIDDEN, MIDDLE),
    "norm_1": (HIDDEN,),
    "norm_2": (HIDDEN,),
}
WEIGHT_STD, LEARNING_RATE, RANK = 0.02, 1e-6, 32
N_LAST = 4

Tensors = Mapping[str, torch.Tensor]


class Sender:
    """The sending end of a connection to a receiving process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sent_weights = SentWeights()
        self._version: int | None = None

    def send(self, tensors: Tensors, kind: SyncKind = "full") -> int:
        """Send tensors, in bfloat16 except for factors. Return the bytes. Later `full` syncs send changes."""
        specs = tuple(
            TensorSpec(name, tuple(tensor.shape), torch.float32 if is_factor(name) else torch.bfloat16)
            for name, tensor in tensors.items()
        )
        sends_changes = kind == "full"
        base, self._version = self._version, (self._version or 0) + 1
        plan = SyncPlan(
            self._version,
            "auto",
            f"127.0.0.1:{free_port()}",
            specs,
            timeout_s=600.0,
            kind=kind,
            tracks_changes=sends_changes,
            base_version=base if sends_changes else None,
        )
        self._connection.send(plan)
        receipt = send(plan, iter(tensors.items()), self._sent_weights if sends_changes else None)
        received = self._connection.recv()
        assert received == receipt, f"{received} instead of {receipt}"
        return receipt.n_sent


def main() -> int:
    """Measure and write the results."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--layers", type=int, default=LAYERS)
    arguments.add_argument("--vocabulary", type=int, default=VOCAB)
    arguments.add_argument("--steps", type=int, default=24)
    arguments.add_argument("--dry-run", action="store_true", help="print the results only")
    options = arguments.parse_args()
    shapes = model_shapes(options.layers, options.vocabulary)
    rows: dict[str, float] = {}  # bytes
    for dtype in (torch.float32, torch.bfloat16):
        with receiving_process() as connection:
            whole, *changes = measure_changes(shapes, dtype, options.steps, Sender(connection))
        rows["all weights"] = whole
        source = f"from weights and moments in {dtype}".replace("torch.", "")
        rows[f"changes of the first step, {source}"] = changes[0]
        rows[f"changes of later steps, {source}"] = statistics.mean(changes[-N_LAST:])
    with receiving_process() as connection:
        base, factors = measure_adapter(shapes, Sender(connection))
    rows |= {f"adapter of rank {RANK} and its base": base, f"adapter of rank {RANK}": factors}
    facts: dict[str, Any] = {"conditions": conditions(), "steps": options.steps}
    text = report(rows, **facts)
    print(text)
    if not options.dry_run:
        (HERE / "changes.json").write_text(json.dumps(facts | {"bytes": rows}, indent=2) + "\n")
        (HERE / "changes.md").write_text(text)
    return 0


def model_shapes(n_layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return the model's tensors. The head is tied to the embeddings."""
    shapes: dict[str, tuple[int, ...]] = {"embeddings": (vocabulary, HIDDEN)}
    for layer in range(n_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in LAYER.items()}
    return shapes


def measure_changes(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, n_steps: int, sender: Sender
) -> list[int]:
    """Train weights of a dtype that start as bfloat16. Return the bytes of all, and of each step's changes."""
    torch.manual_seed(0)
    weights = {name: (WEIGHT_STD * torch.randn(shape)).bfloat16().to(dtype) for name, shape in shapes.items()}
    optimizers = {name: torch.optim.AdamW([tensor], lr=LEARNING_RATE, fused=True) for name, tensor in weights.items()}
    n_bytes = [sender.send(weights)]
    for _ in range(n_steps):
        train(weights, optimizers)
        n_bytes.append(sender.send(weights))
    return n_bytes


def train(weights: Tensors, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Take an optimizer step on random gradients, one tensor after the other."""
    for name, tensor in weights.items():
        tensor.grad = torch.randn_like(tensor)
        optimizers[name].step()
        tensor.grad = None


def measure_adapter(shapes: Mapping[str, tuple[int, ...]], sender: Sender) -> tuple[int, int]:
    """Return the bytes of an adapter on all linear modules, with its base and alone."""
    factors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if name != "embeddings" and len(shape) == 2:
            factors |= {name + LEFT: torch.randn(shape[0], RANK), name + RIGHT: torch.randn(RANK, shape[1])}
    base = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return sender.send({**factors, **base}, "base_and_factors"), sender.send(factors, "factors")


@contextmanager
def receiving_process() -> Iterator[Connection]:
    """Start a process that receives according to the plans sent to it."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    try:
        ours.recv()
        yield ours
        ours.send(None)
        process.join(timeout=60)
    finally:
        process.kill()


def receive(connection: Connection) -> None:
    """Receive according to every plan, into the same mirror."""
    mirror = WeightMirror()
    connection.send("ready")
    while (plan := connection.recv()) is not None:
        receiver = MirroredReceiver(replace(plan, rank=1), mirror)
        for _ in receiver:
            pass
        connection.send(receiver.receipt)


def report(rows: Mapping[str, float], conditions: str, steps: int) -> str:
    """Return the page."""
    whole = rows["all weights"]
    lines = [f"| {name} | {n_bytes / 1e6:,.0f} | {100 * n_bytes / whole:.1f}% |" for name, n_bytes in rows.items()]
    return "\n".join(
        [
            "# Weight syncs of changes and adapters",
            "",
            f"`make bench-changes`, {conditions}.",
            "",
            f"A random model in the shape of Qwen3-0.6B is trained by AdamW with a learning rate of {LEARNING_RATE:g} "
            f"on random gradients for {steps} steps. Its weights begin as bfloat16 numbers with a standard deviation "
            f"of {WEIGHT_STD}. After each step, they are sent in bfloat16 to a second process, and checksums show that "
            f"both hold the same weights. The rows of later steps are means of the last {N_LAST}. The adapter, in "
            "float32, changes all linear modules but the head.",
            "",
            "| sent | MB | of all |",
            "|---|---|---|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
