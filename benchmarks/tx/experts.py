"""`make bench-experts`: compute a mixture-of-experts layer with the selected experts only, and with all experts.

The two variants alternate in one run on random weights and tokens, for the forward pass and with adapter gradients. The
script writes `experts.md` next to this file.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from harness import conditions

from tx.models import moe
from tx.models.config import MoeConfig
from tx.models.lora import Factors

HERE = Path(__file__).parent
HIDDEN, MIDDLE, RANK, TOKENS = 256, 192, 8, 2048
SHAPES = {"gate": (HIDDEN, MIDDLE), "up": (HIDDEN, MIDDLE), "down": (MIDDLE, HIDDEN)}
EXPERTS = ((16, 2), (64, 4), (128, 8))  # number of experts, and of active experts per token


def main() -> int:
    """Measure and write the results."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    rounds = arguments.parse_args().rounds
    rows = [row for n_experts, n_active in EXPERTS for row in measure(n_experts, n_active, rounds)]
    lines = [
        "# Computing a mixture of experts",
        "",
        f"`make bench-experts`, {rounds} rounds, {conditions()}.",
        "",
        f"{TOKENS} tokens through one layer of experts on JAX, with {HIDDEN} hidden and {MIDDLE} intermediate units "
        f"and adapters of rank {RANK}. The times are medians. The speed-up is the median of the ratios per round.",
        "",
        "| experts, active | pass | only active experts, seconds | all experts, seconds | speed-up |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]
    text = "\n".join(lines)
    (HERE / "experts.md").write_text(text)
    print(text)
    return 0


def measure(n_experts: int, n_active: int, rounds: int) -> list[str]:
    """Measure one size and return its table rows."""
    random = np.random.default_rng(0)

    def random_array(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) * 0.05, jnp.float32)

    config = MoeConfig(n_experts=n_experts, n_active=n_active, intermediate_size=MIDDLE, normalizes_weights=True)
    weights = {name: random_array(n_experts, *shape) for name, shape in SHAPES.items()} | {
        "router": random_array(HIDDEN, n_experts)
    }
    factors = {
        name: Factors(random_array(1, n_experts, n_in, RANK), random_array(1, n_experts, RANK, n_out))
        for name, (n_in, n_out) in SHAPES.items()
    }
    tokens = random_array(1, TOKENS, HIDDEN) * 20

    def loss(factors: dict[str, Factors], tokens: jax.Array) -> jax.Array:
        return jnp.sum(moe.mix_experts(config, weights, factors, jnp.ones(1), tokens) ** 2)

    one_per_sequence = tokens.reshape(TOKENS, 1, HIDDEN)  # as in sampling, where all experts are computed
    rows = []
    for name, work in (("forward", jax.jit(loss)), ("forward and backward", jax.jit(jax.grad(loss, argnums=(0, 1))))):
        active, all_experts = [], []
        for round_index in range(rounds + 1):  # the first round compiles
            for inputs, seconds in ((tokens, active), (one_per_sequence, all_experts)):
                elapsed = measure_seconds(lambda inputs=inputs, work=work: work(factors, inputs))
                if round_index:
                    seconds.append(elapsed)
        ratio = statistics.median(b / a for a, b in zip(active, all_experts, strict=True))
        rows.append(
            f"| {n_experts}, {n_active} | {name} | {statistics.median(active):.3f} "
            f"| {statistics.median(all_experts):.3f} | {ratio:.1f} |"
        )
    return rows


def measure_seconds(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes."""
    started = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
