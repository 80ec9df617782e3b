"""The time of a step and its cost, estimated from the speed of the hardware."""

import time
from dataclasses import dataclass

import torch

from skyrl_train.algorithms.rules import reads_reference
from skyrl_train.plan.hardware import Hardware
from skyrl_train.plan.memory import MemoryForecast
from skyrl_train.plan.run_plan import RunPlan, TrainingPlan

ERROR = 2.0
"""Assumed factor by which a time may be wrong. Only the update of a 0.6B model was measured: 29% of an H200's peak."""
TRAINING_UTILIZATION = {"cpu": 0.45, "cuda": 0.3}
"""Share of the peak FLOP/s that forward and backward passes reach."""
PREFILL_UTILIZATION = 0.3
BANDWIDTH_UTILIZATION = {"embedded": 0.2, "server": 0.5}
"""Share of the memory bandwidth that decoding reaches: with the embedded engine, and with vLLM or SGLang."""


@dataclass(frozen=True, slots=True)
class SpeedForecast:
    """Seconds of a step by phase, and its tokens."""

    seconds: dict[str, float]
    n_tokens: int
    n_gpus: int

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Prompt and response tokens per second."""
        return self.n_tokens / self.step_seconds

    def cost(self, price: float) -> float:
        """Return the price of a step, for a `price` per GPU and hour. A machine without GPUs counts as one."""
        return self.step_seconds / 3600 * max(1, self.n_gpus) * price


def forecast_speed(plan: TrainingPlan, hardware: Hardware, memory: MemoryForecast) -> SpeedForecast | None:
    """Forecast the time of a step. Return None for a GPU of unknown speed."""
    if hardware.has_gpus and hardware.gpu is None:
        return None
    kind = "cuda" if hardware.has_gpus else "cpu"
    flops, bandwidth = (hardware.gpu.flops, hardware.gpu.bandwidth) if hardware.gpu else _measure_cpu()
    trainer, rows, policy = plan.cfg.trainer, memory.rows, plan.models[0]
    n_gpus = sum(nodes * per_node for nodes, per_node in plan.ranks.values()) or 1
    n_ranks = plan.count_data_parallel_ranks()
    n, n_trained = policy.n_parameters or 0, policy.n_trained or 0
    n_batch = plan.cfg.trainer.train_batch_size
    n_mini_batches = n_batch / (rows.n_prompts * n_ranks)
    n_tokens = rows.n_tokens * n_mini_batches  # of one rank, where a group's prompt counts once
    compute = flops * TRAINING_UTILIZATION[kind]
    per_update = 4 * n + 2 * n_trained + (2 * n if trainer.gradient_checkpointing else 0)
    seconds, n_epochs = {}, 1
    if isinstance(plan, RunPlan):
        generator = plan.cfg.generator
        n_sequences = n_batch * rows.n_samples / max(1, generator.n_local_engines)
        n_sequential = generator.max_turns * generator.sampling_params.max_generate_length
        n_waves = -(-n_sequences // generator.max_num_seqs)
        reads = plan.engine_bytes or policy.weight_bytes
        share = BANDWIDTH_UTILIZATION["embedded" if generator.engine.is_embedded else "server"]
        n_sampled = n_sequences * n_sequential
        decode = max(n_waves * n_sequential * reads / (bandwidth * share), 2 * n * n_sampled / compute)
        prefill = 2 * n * n_sequences * (rows.row_tokens - n_sequential) / (flops * PREFILL_UTILIZATION)
        seconds["rollout"] = decode + prefill
        n_scored = n + (n if reads_reference(plan.cfg.trainer.algorithm) else 0)
        seconds["score"] = 2 * n_scored * n_tokens / compute
        n_epochs = plan.cfg.trainer.update_epochs_per_batch
    n_critic = sum(model.n_parameters or 0 for model in plan.models if model.role == "critic")
    seconds["update"] = n_epochs * (per_update + 6 * n_critic) * n_tokens / compute
    return SpeedForecast(seconds, n_batch * rows.n_samples * rows.row_tokens, n_gpus if hardware.has_gpus else 0)


def _measure_cpu() -> tuple[float, float]:
    """Return this machine's float32 FLOP/s and memory bandwidth, measured for a tenth of a second each."""
    size = 1024
    matrix = torch.ones(size, size)
    vector = torch.ones(1 << 25)  # 128 MiB, more than the caches hold
    rates = []
    for work, run in ((2 * size**3, lambda: matrix @ matrix), (vector.nbytes, vector.sum)):
        run()
        started, n_runs = time.perf_counter(), 0
        while (seconds := time.perf_counter() - started) < 0.1:
            run()
            n_runs += 1
        rates.append(work * n_runs / seconds)
    return rates[0], rates[1]
