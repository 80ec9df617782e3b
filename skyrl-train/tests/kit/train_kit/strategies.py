"""Small models that ranks compute in every layout of FSDP2 and Megatron-Core, and the comparison with one process."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from skyrl_train.algorithms.objectives import Objective
from skyrl_train.config.policy import FSDPConfig, LoraConfig, MegatronConfig
from skyrl_train.config.trainer import TrainerConfig
from skyrl_train.launch.process import ProcessRank
from skyrl_train.models.lora import add_adapter, save_adapter, trained_parameters
from skyrl_train.types import TrainingBatch
from skyrl_train.types.specs import LoraSpec, ModelSpec, Role
from skyrl_train.workers.group import WorkerGroup
from train_kit.batches import fill_in_values, off_policy_batch
from train_kit.models import PREFIX_SHARING_ARCHITECTURES, SMALL, create_model, load_on_cpu
from train_kit.ranks import SharedRanks, load_group, save, single_rank, spec
from train_kit.workers import config, largest_difference, policy_objective

# -- models

PADDING = 7  # a token that rows contain: its embedding is not trained
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, PretrainedConfig] = PREFIX_SHARING_ARCHITECTURES | {
    "qwen3": Qwen3Config(**SMALL | {"head_dim": 16}, tie_word_embeddings=False, pad_token_id=PADDING),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True, pad_token_id=PADDING),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
}
N_TOKENS = SMALL["vocab_size"]  # odd: the last rank's part of the vocabulary is padded
MERGED = {"merge_on_export": True}


@cache
def batch_for(path: Path, seed: int) -> TrainingBatch:
    """Return a random batch for a policy or critic, which tests must not change."""
    return fill_in_values(off_policy_batch(load_on_cpu(path), seed, n_tokens=N_TOKENS))


# -- layouts


@dataclass(frozen=True)
class Layout:
    """The division of a model among ranks."""

    megatron: MegatronConfig | None = None
    """None: FSDP2."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    sequence_parallel_size: int = 1
    n_ranks: int = 2


def _megatron(n_ranks: int = 2, **sizes: Any) -> Layout:
    return Layout(MegatronConfig(**{f"{name}_parallel_size": size for name, size in sizes.items()}), n_ranks=n_ranks)


def _sequence(n_ranks: int = 2, **sizes: Any) -> Layout:
    layout = _megatron(n_ranks, tensor_model=2, **sizes)
    return replace(layout, megatron=layout.megatron.model_copy(update={"sequence_parallel": True}))


LAYOUTS = {
    "fsdp2": Layout(),
    "fsdp2, kept": Layout(fsdp=FSDPConfig(reshard_after_forward=False)),
    "fsdp2, two copies": Layout(fsdp=FSDPConfig(fsdp_size=1, cpu_offload=True)),
    "four, fsdp2": Layout(n_ranks=4),
    "four, fsdp2, two copies": Layout(fsdp=FSDPConfig(fsdp_size=2, cpu_offload=True), n_ranks=4),
    "four, fsdp2, kept by two": Layout(fsdp=FSDPConfig(reshard_after_forward=2), n_ranks=4),
    "tokens": Layout(sequence_parallel_size=2),
    "tokens, offloaded": Layout(
        fsdp=FSDPConfig(cpu_offload=True, reshard_after_forward=False), sequence_parallel_size=2
    ),
    "four, tokens × data": Layout(sequence_parallel_size=2, n_ranks=4),
    "four, tokens": Layout(sequence_parallel_size=4, n_ranks=4),
    "tensor": _megatron(tensor_model=2),
    "sequence": _sequence(),
    "pipeline": _megatron(pipeline_model=2),
    "context": _megatron(context=2),
    "data": _megatron(),
    "four, tensor × data": _megatron(4, tensor_model=2),
    "four, sequence × pipeline": _sequence(4, pipeline_model=2),
    "four, pipeline × data": _megatron(4, pipeline_model=2),
    "four, context × tensor": _megatron(4, context=2, tensor_model=2),
    "four, context × sequence": _sequence(4, context=2),
    "four, context × pipeline": _megatron(4, context=2, pipeline_model=2),
    "four, context × data": _megatron(4, context=2),
    "four, context": _megatron(4, context=4),
}
MEGATRON = {name for name, layout in LAYOUTS.items() if layout.megatron is not None}


def param(*values: Any, name: str = "", is_nightly: bool = False) -> Any:
    """Return the parameters of a test; layouts of Megatron-Core, or cases of them, need the package."""
    needed = {value.layout if isinstance(value, Case) else value for value in values if isinstance(value, str | Case)}
    marks = [pytest.mark.megatron] if MEGATRON & needed else []
    marks += [pytest.mark.nightly] if is_nightly else []
    return pytest.param(*values, id=name or "-".join(map(str, values)), marks=marks)


def layouts(*names: str, nightly: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Run a test for these layouts, for some of them every night only."""
    params = [param(name) for name in names] + [param(name, is_nightly=True) for name in nightly]
    return pytest.mark.parametrize("layout", params)


# -- groups


class Strategies:
    """Models on ranks in any layout, and in this process, for one test."""

    def __init__(self, shared: dict[str, SharedRanks], folder: Path, models: Path) -> None:
        """Write files into `folder`, and models for all tests into `models`."""
        self.folder = folder
        self._models = models
        self._shared = shared
        self._borrowed: dict[tuple[bool, int], list[ProcessRank]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Strategies":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ranks(self, layout: str) -> list[ProcessRank]:
        """Return the shared ranks of a layout."""
        is_megatron, n_ranks = layout in MEGATRON, LAYOUTS[layout].n_ranks
        if is_megatron:
            pytest.importorskip("megatron.core", reason="needs megatron-core, the extra mcore of skyrl-train")
        if (is_megatron, n_ranks) not in self._borrowed:
            shared = self._shared["megatron" if is_megatron else "fsdp2"]
            self._borrowed[is_megatron, n_ranks] = self._stack.enter_context(shared.borrow(n_ranks))
        return self._borrowed[is_megatron, n_ranks]

    def path(self, model: str) -> Path:
        """Return the folder of a model with random weights."""
        path = self._models / model
        if not path.exists():
            create_model(MODELS[model]).save_pretrained(path)
        return path

    def adapter(self, model: str) -> dict[str, Any]:
        """Return the settings of an adapter with random weights."""
        path = self._models / f"adapter of {model}"
        if not path.exists():
            adapted = load_on_cpu(self.path(model))
            add_adapter(adapted, LoraSpec(LoraConfig(rank=3, alpha=12), "lora", str(self.path(model))))
            tensors, generator = trained_parameters(adapted), torch.Generator().manual_seed(1)
            for tensor in tensors.values():
                tensor.data.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
            save_adapter(adapted, tensors, str(self.path(model)), path)
        return {"lora_path": str(path)}

    def batch(self, model: str, seed: int = 1) -> TrainingBatch:
        """Return a random batch, which tests must not change."""
        return batch_for(self.path(model), seed)

    def spec(
        self,
        model: str | Path,
        layout: str | None = None,
        lora: dict[str, Any] | None = None,
        *,
        role: Role = "policy",
        max_grad_norm: float = 0.5,
        trainer: dict[str, Any] | None = None,
        optimizer: dict[str, Any] | None = None,
        **loading: Any,
    ) -> ModelSpec:
        """Return the spec of a model, or of its adapter, whose gradients are clipped in most steps."""
        path = self.path(model) if isinstance(model, str) else model
        section = {"model": {"path": str(path), "lora": lora or {}}}
        policy = section | {"optimizer_config": optimizer or {"lr": 1e-4 if lora is None else 1e-3}}
        settings = {"micro_train_batch_size_per_gpu": 3, "policy": policy, "critic": section} | (trainer or {})
        cfg = config(**settings).trainer
        divided = LAYOUTS[layout] if layout else Layout()
        return replace(
            spec(role, path, cfg, max_grad_norm=max_grad_norm, **loading),
            megatron=divided.megatron,
            fsdp=divided.fsdp,
            sequence_parallel_size=divided.sequence_parallel_size,
        )

    async def load(
        self,
        model: str | Path,
        layout: str | None = None,
        lora: dict[str, Any] | None = None,
        *,
        objective: Objective | None = None,
        change: Callable[[ModelSpec], ModelSpec] = lambda spec: spec,
        **settings: Any,
    ) -> WorkerGroup:
        """Load a model, on ranks if it has a layout; by default with PPO's objective and a bonus for entropy."""
        ranks = self.ranks(layout) if layout else [single_rank()]
        loaded = change(self.spec(model, layout, lora, **settings))
        return await load_group(ranks, loaded, objective or policy_objective(self.config()))

    def config(self, trainer: dict[str, Any] | None = None) -> TrainerConfig:
        """Return the configuration of an objective."""
        return config(**trainer or {"algorithm": {"use_entropy_loss": True}}).trainer

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    async def save(self, group: WorkerGroup) -> Path:
        """Save the state of a group into a new folder."""
        return await save(group, self.new_folder())

    async def export(self, group: WorkerGroup) -> Path:
        """Export the model of a group into a new folder."""
        folder = self.new_folder()
        await group.export(folder)
        return folder

    async def weights(self, group: WorkerGroup) -> dict[str, torch.Tensor]:
        """Return the exported weights of a group."""
        return AutoModelForCausalLM.from_pretrained(await self.export(group), dtype=torch.float32).state_dict()


# -- comparison


@dataclass(frozen=True)
class Case:
    """A model that takes two steps."""

    layout: str
    model: str = "qwen3"
    what: str = ""
    """What is special, for the id."""
    objective: Callable[[TrainerConfig], Objective] = policy_objective
    role: Role = "policy"
    trainer: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    """With `adapter`, that of `Strategies.adapter`."""
    loading: dict[str, Any] = field(default_factory=dict)
    batches: str = "conversations"
    is_nightly: bool = False

    @property
    def param(self) -> Any:
        name = "-".join(filter(None, (self.layout, self.model, self.what)))
        return param(self, name=name, is_nightly=self.is_nightly)


def assert_same_weights(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    """Compare weights, except for biases of keys: attention ignores them, and AdamW amplifies rounding errors."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if atol and name.endswith(("k_proj.bias", "c_attn.bias")):
            continue
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_gradient(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    largest = max(values.abs().max().item() for values in expected.values())
    assert largest > 1e-4
    difference = largest_difference(actual, expected)
    assert difference < 1e-5 * max(1.0, largest), f"gradients differ by {difference:.2g} of {largest:.2g}"
