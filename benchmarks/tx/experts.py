"""`make bench-experts`: a layer of a mixture of experts, computed by the experts that are chosen, and by all of them.

Both in turn, in one run, on random weights and tokens: forward, and with gradients of adapters. Writes `experts.md`
beside this file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from conditions import conditions

from tx.models import moe
from tx.models.config import MoeConfig
from tx.models.lora import Factors

HERE = Path(__file__).parent
HIDDEN, MIDDLE, RANK, TOKENS = 256, 192, 8, 2048
SHAPES = {"gate": (HIDDEN, MIDDLE), "up": (HIDDEN, MIDDLE), "down": (MIDDLE, HIDDEN)}
EXPERTS = ((16, 2), (64, 4), (128, 8))  # how many, and how many of them for each token


def main() -> int:
    """Measure, and write."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    rounds = arguments.parse_args().rounds
    rows = [row for n_experts, n_active in EXPERTS for row in measure(n_experts, n_active, rounds)]
    lines = [
        "# The cost of experts",
        "",
        f"`make bench-experts`, {rounds} rounds; {conditions()}.",
        "",
        f"{TOKENS} tokens through one layer of experts on JAX, of {HIDDEN} and {MIDDLE} units, with adapters of rank "
        f"{RANK}: medians, and the median of each round's ratio.",
        "",
        "| experts, and of each token | work | chosen ones, seconds | all, seconds | times as fast |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]
    text = "\n".join(lines)
    (HERE / "experts.md").write_text(text)
    print(text)
    return 0


def measure(n_experts: int, n_active: int, rounds: int) -> list[str]:
    """Rows of the table."""
    random = np.random.default_rng(0)

    def some(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) * 0.05, jnp.float32)

    config = MoeConfig(n_experts=n_experts, n_active=n_active, intermediate_size=MIDDLE, normalizes_weights=True)
    weights = {name: some(n_experts, *shape) for name, shape in SHAPES.items()} | {"router": some(HIDDEN, n_experts)}
    factors = {
        name: Factors(some(1, n_experts, n_in, RANK), some(1, n_experts, RANK, n_out))
        for name, (n_in, n_out) in SHAPES.items()
    }
    tokens = some(1, TOKENS, HIDDEN) * 20

    def loss(factors: dict[str, Factors], tokens: jax.Array) -> jax.Array:
        return jnp.sum(moe.mix_experts(config, weights, factors, jnp.ones(1), tokens) ** 2)

    one_by_one = tokens.reshape(TOKENS, 1, HIDDEN)  # as in sampling, where all experts compute
    rows = []
    for name, work in (("forward", jax.jit(loss)), ("forward and backward", jax.jit(jax.grad(loss, argnums=(0, 1))))):
        chosen, every = [], []
        for number in range(rounds + 1):  # the first compiles
            for told, seconds in ((tokens, chosen), (one_by_one, every)):
                elapsed = clock(lambda told=told, work=work: work(factors, told))
                if number:
                    seconds.append(elapsed)
        ratio = statistics.median(b / a for a, b in zip(chosen, every, strict=True))
        rows.append(
            f"| {n_experts}, {n_active} | {name} | {statistics.median(chosen):.3f} | {statistics.median(every):.3f} "
            f"| {ratio:.1f} |"
        )
    return rows


def clock(work: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
