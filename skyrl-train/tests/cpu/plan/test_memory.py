import math
from pathlib import Path

import pytest
from transformers import Qwen3Config

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.cli import PRESETS
from skyrl_train.entrypoints.memory_plan import choose_hardware, describe_memory, fit, plan_run
from skyrl_train.entrypoints.start import parse_for_plan
from skyrl_train.errors import ConfigError
from skyrl_train.plan.hardware import GIB, Hardware
from skyrl_train.plan.memory import MemoryForecast, forecast_memory
from skyrl_train.plan.speed import forecast_speed

SIZES = {  # hidden size, MLP size, layers
    "0.6B": (1024, 3072, 28),
    "1.7B": (2048, 6144, 28),
    "4B": (2560, 9728, 36),
    "14B": (5120, 17408, 40),
}
CATCH = (
    *("trainer.train_batch_size=128", "trainer.policy_mini_batch_size=32", "generator.n_samples_per_prompt=4"),
    *("trainer.max_prompt_length=256", "generator.max_turns=5", "generator.sampling_params.max_generate_length=1"),
)


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    """A folder with the descriptions of Qwen3 models, without their weights."""
    for name, (hidden, intermediate, n_layers) in SIZES.items():
        Qwen3Config(
            vocab_size=151936,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=n_layers,
            num_attention_heads=hidden // 128,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            tie_word_embeddings=hidden < 5120,
            architectures=["Qwen3ForCausalLM"],
        ).save_pretrained(tmp_path / name)
    return tmp_path


def configure(path: Path, *overrides: str) -> SkyRLConfig:
    cfg = parse_for_plan("train", [*CATCH, f"trainer.policy.model.path={path}", *overrides], None)
    assert isinstance(cfg, SkyRLConfig)
    return cfg


def forecast(path: Path, hardware: Hardware, *overrides: str) -> MemoryForecast:
    memory = forecast_memory(plan_run(configure(path, *overrides), hardware), hardware)
    assert memory is not None
    return memory


def part(memory: MemoryForecast, name: str, phase: str) -> float:
    return sum(p.phases.get(phase, 0.0) for p in memory.parts if p.name == name)  # type: ignore[call-overload]


def test_full_training_of_a_1_7b_model_fits_a_24_gb_card(qwen3: Path) -> None:
    card = choose_hardware("4090", None, 38)
    memory = forecast(qwen3 / "1.7B", card, "+preset=single_gpu_24gb")
    assert memory.find_shortage() is None
    assert memory.peak("device")[1] < 24 * GIB
    n = 1_720_574_976
    assert part(memory, "policy: weights", "update") == 2 * n
    assert part(memory, "policy: gradients", "update") == 4 * n
    assert part(memory, "policy: optimizer state", "update") == pytest.approx(2.03 * n, rel=0.001)
    memory = forecast(qwen3 / "1.7B", card)
    assert memory.find_shortage() is not None
    assert part(memory, "policy: optimizer state", "update") == 8 * n


@pytest.mark.parametrize(
    ("preset", "model", "gpu"),
    [("single_gpu_24gb", "1.7B", "RTX 3090"), ("single_gpu_80gb", "4B", "H100"), ("eight_gpu", "14B", "A100")],
)
def test_presets_fit_the_machines_that_they_are_named_after(qwen3: Path, preset: str, model: str, gpu: str) -> None:
    memory = forecast(qwen3 / model, choose_hardware(gpu, None, None), f"+preset={preset}")
    assert memory.find_shortage() is None


def test_a_preset_is_overridden_by_other_settings_and_must_exist(qwen3: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = configure(qwen3 / "0.6B", "trainer.policy.optimizer_config.name=muon", "+preset=single_gpu_24gb")
    assert cfg.trainer.policy.optimizer_config.name == "muon"
    assert cfg.trainer.policy.model.train_dtype == "bfloat16"
    with pytest.raises(ConfigError, match=f"use one of auto, {', '.join(PRESETS)}"):
        configure(qwen3 / "0.6B", "+preset=single_gpu_12gb")
    with caplog.at_level("INFO"):
        assert configure(qwen3 / "0.6B", "+preset=auto").trainer.train_batch_size == 128
    assert "preset=cpu_tiny" in caplog.text


def test_changes_are_the_cheapest_that_fit(qwen3: Path) -> None:
    card = choose_hardware("4090", None, 38)
    plan, changes = fit(plan_run(configure(qwen3 / "1.7B"), card), card)
    keys = {key for change in changes for key, _ in change.settings}
    assert "trainer.policy.model.lora.rank" not in keys
    assert {"trainer.policy.optimizer_config.name", "trainer.policy.model.train_dtype"} <= keys
    fitting = forecast_memory(plan, card)
    assert fitting is not None
    assert fitting.find_shortage() is None
    small = choose_hardware(None, 9, 64)
    _, changes = fit(plan_run(configure(qwen3 / "1.7B"), small), small)
    keys = {key for change in changes for key, _ in change.settings}
    assert "trainer.policy.model.lora.rank" in keys
    assert "trainer.policy.optimizer_config.name" not in keys  # of no use to an adapter
    tiny = choose_hardware(None, 1, None)
    with pytest.raises(ConfigError, match="no known settings make this run fit"):
        fit(plan_run(configure(qwen3 / "14B"), tiny), tiny)


def test_ranks_and_offloading_divide_the_memory(qwen3: Path) -> None:
    gpu = choose_hardware("H100", None, 500)
    eight = ("trainer.placement.policy_num_gpus_per_node=8", "trainer.placement.offload_idle=false")
    one, shared = forecast(qwen3 / "4B", gpu), forecast(qwen3 / "4B", gpu, *eight)
    assert part(shared, "policy: weights", "load") == part(one, "policy: weights", "load") / 8
    offloading = forecast(qwen3 / "4B", gpu, *eight, "trainer.placement.offload_idle=true")
    assert part(offloading, "policy: optimizer state", "rollout") == 0
    assert part(offloading, "policy: offloaded", "rollout") == pytest.approx(
        8 * (part(shared, "policy: optimizer state", "rollout") + part(shared, "policy: weights", "rollout"))
    )


def test_a_table_marks_what_does_not_fit(qwen3: Path) -> None:
    text = "\n".join(describe_memory(forecast(qwen3 / "1.7B", choose_hardware("4090", None, 38))))
    assert "memory of each GPU (RTX 4090), 25.8 GB free" in text
    assert "GB too much" in text
    assert "host memory, 40.8 GB free" in text


def test_a_step_takes_longer_on_a_slower_card(qwen3: Path) -> None:
    seconds = {}
    for gpu in ("H100", "L4"):
        hardware = choose_hardware(gpu, None, None)
        plan = plan_run(configure(qwen3 / "0.6B"), hardware)
        memory = forecast_memory(plan, hardware)
        assert memory is not None
        speed = forecast_speed(plan, hardware, memory)
        assert speed is not None
        seconds[gpu] = speed.step_seconds
        assert speed.cost(2.0) == pytest.approx(2 * speed.step_seconds / 3600)
    assert seconds["L4"] > 4 * seconds["H100"]
    unknown = Hardware("an accelerator", 1e9, math.inf)
    assert forecast_speed(plan, unknown, memory) is None


def test_a_cache_in_host_memory_takes_what_its_sequences_may_fill_and_is_never_certain(qwen3: Path) -> None:
    def plan(gigabytes: float, *overrides: str) -> MemoryForecast:
        return forecast(qwen3 / "0.6B", Hardware("CPU", None, gigabytes * 1e9), *overrides)

    short = ("trainer.train_batch_size=32", "trainer.policy_mini_batch_size=32")
    per_token = 2 * 28 * 8 * 128 * 4
    n_sequences, n_tokens = 32 * 4, 9 * 64  # 256 + 5 * 65 - 64, in regions
    expected = n_sequences * n_tokens * per_token + 28 * 2**21  # two halves of a huge page per layer
    assert part(plan(100, *short), "engine: key-value cache", "rollout") == expected
    small = plan(14)
    cache = part(small, "engine: key-value cache", "rollout")
    assert cache < 0.8 * 14e9
    assert small.total("host", "update") - small.certain_total("host", "update") == cache


def test_files_are_counted_while_they_are_read(tiny_model_path: Path) -> None:
    n_bytes = (tiny_model_path / "model.safetensors").stat().st_size  # float32
    in_bf16 = ("trainer.policy.model.dtype=bfloat16", "trainer.policy.model.train_dtype=bfloat16")
    cpu, gpu = Hardware("CPU", None, 1e9), Hardware("H100", 1e9, 1e9)

    def size(hardware: Hardware, *overrides: str) -> float:
        return part(forecast(tiny_model_path, hardware, *overrides), "weight files", "load")

    assert size(cpu) == 0  # the mapped files are the weights
    assert size(cpu, *in_bf16) == n_bytes
    assert size(gpu) == n_bytes
    assert size(gpu, *in_bf16) == pytest.approx(1.5 * n_bytes, rel=0.05)
    memory = forecast(tiny_model_path, cpu, *in_bf16)
    assert memory.total("host", "load") - memory.certain_total("host", "load") == n_bytes
