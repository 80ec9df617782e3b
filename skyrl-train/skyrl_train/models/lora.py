"""Low-rank adapters (Hu et al., 2021, arXiv:2106.09685) through peft: W + (alpha / rank) · B·A with W frozen.

`add_adapter` replaces modules of a Hugging Face model in place. Everything that holds the model, such as the embedded
engine, then computes with the adapter.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import Linear, LoraLayer, ParamWrapper
from peft.tuners.lora.layer import LoraVariant
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from skyrl_train.errors import ConfigError
from skyrl_train.media.processing import has_vision
from skyrl_train.models.attributes import with_attribute
from skyrl_train.models.checksum import tensor_checksum
from skyrl_train.models.deferred import is_finite
from skyrl_train.models.loading import create_empty
from skyrl_train.models.low_rank import LEFT, RIGHT, MatrixChange
from skyrl_train.models.quantization import QuantizedLinear, quantized_layers
from skyrl_train.models.vision import language_model_name
from skyrl_train.models.weight_files import suggest_folder
from skyrl_train.types.specs import LoraSpec, Role, SyncKind

logger = logging.getLogger(__name__)

NAME = "default"
"""Name of the adapter within the model."""
FILE_PREFIX = "base_model.model."
"""Prefix of tensor names in peft's files."""
VALUE_HEAD = "score"
"""Head of a critic or reward model."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ADAPTER_FOLDER = "lora_adapter"
"""Folder with the adapter in peft's format, in checkpoints and in exports of the merged model."""
BASE_CHECKSUM = "base_checksum.txt"
"""File with the checksum of the frozen weights, in checkpoints of an adapter."""

Gather = Callable[[torch.Tensor], torch.Tensor]
"""Function that returns the values of a whole parameter, detached, on every rank."""


class _Adapter(LoraVariant):
    """W·x + (alpha / rank) · B·(A·x), added while B multiplies.

    peft writes the product, the scaled product and the sum one after another. The first two are freed at once, but a
    CPU's allocator cannot use every gap again: the passes of an adapter then take a quarter more memory.
    """

    @staticmethod
    def forward(module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        low = module.lora_A[active_adapter](module.lora_dropout[active_adapter](x))
        b, scaling = module.lora_B[active_adapter], module.scaling[active_adapter]
        if low.dtype != result.dtype:  # a float32 adapter on bfloat16 weights, without autocast
            return result + b(low) * scaling
        rows = result.flatten(0, -2), low.flatten(0, -2)
        return torch.addmm(*rows, b.weight.T, alpha=scaling).view_as(result)


def add_adapter(model: PreTrainedModel, lora: LoraSpec) -> None:
    """Freeze a model and add a trainable float32 adapter: a new one with zero effect, or the one in `lora_path`.

    The head of a critic or reward model stays trainable.

    Raises:
        ConfigError: no module has a name of `target_modules`, or the adapter in `lora_path` does not fit.
    """
    has_head = hasattr(model, VALUE_HEAD)
    path = lora.config.lora_path
    config = _new_config(lora, model) if path is None else _load_config(path, lora)
    config.modules_to_save = None  # the value head is trained in place, not copied
    devices = [model.device.index or 0] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(lora.seed)
        try:
            with with_attribute([QuantizedLinear], "weight", property(QuantizedLinear.empty_weight)):
                peft.inject_adapter_in_model(config, model)
        except ValueError as error:
            raise ConfigError(f"{name_source(lora)} does not fit a {type(model).__name__}: {error}") from error
    _check_layers(model, lora)
    for layer in adapter_layers(model).values():
        if type(layer) is Linear:
            layer.lora_variant[NAME] = _Adapter()
    if has_head:
        model.get_submodule(VALUE_HEAD).requires_grad_(True)
        config.modules_to_save = [VALUE_HEAD]
    for parameter in trained_parameters(model).values():
        parameter.data = parameter.data.float()
    if path is not None:
        tensors = read_tensors(path, name_source(lora))
        _check_tensors(model, tensors, name_source(lora))
        with torch.no_grad():
            for name, parameter in trained_parameters(model).items():
                parameter.copy_(tensors[_name_in_file(name)])
    model.eval()
    trained, total = count_parameters(model)
    logger.info(
        "%s: rank %d, alpha %d, %s of %s parameters are trained",
        *(lora.key, config.r, config.lora_alpha, f"{trained:,}", f"{total:,}"),
    )


def adapter_config(model: PreTrainedModel) -> peft.LoraConfig | None:
    """Return the settings of a model's adapter, or None."""
    return getattr(model, "peft_config", {}).get(NAME)


def adapter_layers(model: PreTrainedModel) -> dict[str, Any]:
    """Return peft's LoRA modules by their path in the model."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return the (trained, total) parameter counts."""
    n_quantized = sum(layer.in_features * layer.out_features for layer in quantized_layers(model).values())
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return n_trained, n_quantized + sum(p.numel() for p in model.parameters())


def count_trained(path: str, lora: LoraSpec, role: Role = "policy") -> int:
    """Return the number of trained parameters of an adapter on the model at `path`, without loading its weights.

    Raise ConfigError if the adapter does not fit the model.
    """
    model = create_empty(path, role, local_files_only=True)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        add_adapter(model, lora)
    finally:
        logger.setLevel(level)
    return count_parameters(model)[0]


def adapter_disabled(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Compute without the adapter.

    peft's own switch also freezes the adapter. FSDP would remember that if it happened before the first update.
    """
    return with_attribute(adapter_layers(model).values(), "_disable_adapters", True)


def adapter_dropout(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Apply the adapter's dropout to its inputs. All other modules stay deterministic."""
    modules = [layer.lora_dropout[NAME] for layer in adapter_layers(model).values()]
    return with_attribute(modules, "training", True)


def trained_parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Return the adapter's parameters and the value head of a critic or reward model, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def merged_names(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's own parameters under their names without the adapter.

    Matrices in 4 bits are dequantized one at a time, in the place that they have in an unquantized model.
    """
    quantized = quantized_layers(model)
    own = {id(parameter): name for name, parameter in model.named_parameters() if ".lora_" not in name}
    for path, module in model.named_modules():
        if path in quantized:
            yield f"{path}.weight".replace(".base_layer.", "."), quantized[path].weight
        for parameter in module.parameters(recurse=False):
            if (name := own.pop(id(parameter), None)) is not None:
                yield name.replace(".base_layer.", "."), parameter


def merged_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the saved buffers of the model, such as a router's bias, under their names without the adapter."""
    saved = model.state_dict().keys()
    return {name.replace(".base_layer.", "."): buffer for name, buffer in model.named_buffers() if name in saved}


def base_checksum(model: PreTrainedModel, gather: Gather) -> str:
    """Return the checksum of the frozen weights as they are in the model's files, and the type of their quantization.

    Quantized on another device, the same weights could differ in the last bit.
    """
    quantized = quantized_layers(model).values()
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    total = sum(tensor_checksum(name.replace(".base_layer.", "."), gather(p)) for name, p in frozen)
    total = (total + sum(layer.checksum for layer in quantized)) % 2**64
    return f"{total} nf4" if quantized else str(total)


def sync_tensors(model: PreTrainedModel, kind: SyncKind, gather: Gather) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a weight sync.

    These are the merged model (`full`) in the order of `merged_names`, the adapter's parameters (`adapter`), or the
    low-rank factors of each change. `base_and_factors` adds the frozen tensors.
    """
    if kind == "full":
        layers = adapter_layers(model)
        for name, parameter in merged_names(model):
            tensor = gather(parameter)
            path, _, part = name.rpartition(".")
            if part == "weight" and path in layers:
                tensor = _matrix_change(layers[path], *map(gather, _factors(layers[path]))).apply(tensor)
            yield name, tensor
    elif kind == "adapter":
        for name, parameter in trained_parameters(model).items():
            yield name, gather(parameter)
    else:
        for path, layer in adapter_layers(model).items():
            change = _matrix_change(layer, *map(gather, _factors(layer)))
            yield from ((f"{path}.weight{LEFT}", change.left), (f"{path}.weight{RIGHT}", change.right))
        if kind == "base_and_factors":
            yield from ((name, gather(p)) for name, p in merged_names(model) if not p.requires_grad)


@torch.no_grad()
def change_norm(model: PreTrainedModel, gather: Gather) -> float:
    """Return the Frobenius norm of the change (alpha / rank) · B·A, over all matrices."""
    total = 0.0
    for layer in adapter_layers(model).values():
        a, b = (gather(factor).double() for factor in _factors(layer))
        total += layer.scaling[NAME] ** 2 * ((b.T @ b) * (a @ a.T)).sum().item()  # |BA|² = Σ BᵀB ∘ AAᵀ
    return math.sqrt(max(total, 0.0))


def save_adapter(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], base_path: str, folder: Path) -> None:
    """Write an adapter in peft's format. `tensors` are the gathered `trained_parameters`, by name."""
    config = adapter_config(model)
    assert config is not None
    folder.mkdir(parents=True, exist_ok=True)
    named = {_name_in_file(name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    settings = config.to_dict() | {"base_model_name_or_path": base_path, "inference_mode": True}
    settings = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
    (folder / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """A tensor of a critic's or reward model's head. The adapter's file holds its values, not a change."""

    values: torch.Tensor

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the trained values in the dtype of the base's weight."""
        return self.values.to(weight.dtype)


Changes = Mapping[str, MatrixChange | TrainedHead]
"""Changes of a model's tensors, by name."""


def adapter_role(config: peft.LoraConfig) -> Role:
    """Return the role of the model that an adapter belongs to."""
    roles: Mapping[str, Role] = {"TOKEN_CLS": "critic", "SEQ_CLS": "reward"}
    return roles.get(config.task_type or "", "policy")


def read_changes(path: str, base: str) -> tuple[Changes, dict[str, list[str]], list[str]]:
    """Read the changes that an adapter makes to the model at `base`.

    Returns:
        The changes by name in files, the names in files of each frozen parameter, and the names in files of buffers.
        Files may have more tensors, such as a copy of a tied head.

    Raises:
        ConfigError: the adapter cannot be read, or does not fit the model.
    """
    source = f"the adapter {path}"
    config, tensors = read_config(path, source), read_tensors(path, source)
    model, has_head = create_empty(base, adapter_role(config)), bool(config.modules_to_save)
    if has_head and not hasattr(model, VALUE_HEAD):
        raise ConfigError(
            f"{source} has a head `{VALUE_HEAD}`, and its task_type={config.task_type} has none; set SEQ_CLS for a "
            f"reward model, or TOKEN_CLS for a critic, in its {CONFIG}"
        )
    config.modules_to_save = None
    try:
        peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ConfigError(f"{source} does not fit {base}: {error}") from error
    if has_head:
        model.get_submodule(VALUE_HEAD).requires_grad_(True)
    _check_tensors(model, tensors, source)
    changes: dict[str, MatrixChange | TrainedHead] = {}
    for layer_path, layer in adapter_layers(model).items():
        a, b = (tensors[f"{FILE_PREFIX}{layer_path}.lora_{factor}.weight"] for factor in "AB")
        changes[f"{layer_path}.weight"] = _matrix_change(layer, a, b)
    own = dict(merged_names(model))
    changes |= {name: TrainedHead(tensors[FILE_PREFIX + name]) for name, p in own.items() if p.requires_grad}
    frozen = {name: parameter for name, parameter in own.items() if not parameter.requires_grad}
    files = {name: list(revert_weight_conversion(model, {name: own[name]})) for name in own}
    # A tied head has no parameter of its own, so it has no files.
    in_files = {name: files.get(name, []) for name in changes}
    changes = {in_files[name][0] if len(in_files[name]) == 1 else name: change for name, change in changes.items()}
    return changes, {name: files[name] for name in frozen}, list(revert_weight_conversion(model, merged_buffers(model)))


def _factors(layer: Any) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """Return A (rank, in) and B (out, rank)."""
    return layer.lora_A[NAME].weight, layer.lora_B[NAME].weight


def _matrix_change(layer: Any, a: torch.Tensor, b: torch.Tensor) -> MatrixChange:
    """Return the change by a layer's factors A (rank, in) and B (out, rank). They may be DTensors."""
    a, b = a.float(), b.float() * layer.scaling[NAME]
    if layer.fan_in_fan_out:  # the matrix is (in, out), as in GPT-2
        return MatrixChange(a.T, b.T)
    return MatrixChange(b, a)


def name_source(lora: LoraSpec) -> str:
    """Return the configuration key and value that define an adapter, for error messages."""
    if lora.config.lora_path is not None:
        return f"{lora.key}.lora_path={lora.config.lora_path}"
    return f"{lora.key}.target_modules={lora.config.target_modules}"


def _new_config(lora: LoraSpec, model: PreTrainedModel) -> peft.LoraConfig:
    config = lora.config
    names = {"target_modules": config.target_modules, "exclude_modules": config.exclude_modules}
    paths = [path for path, _ in model.named_modules()]
    for key, value in names.items():
        for name in value if isinstance(value, list) else []:
            if not any(path == name or path.endswith(f".{name}") for path in paths):
                raise ConfigError(
                    f"{lora.key}.{key}={value}: a {type(model).__name__} has no module {name}; its linear modules are "
                    f"{', '.join(_linear_names(model))}"
                )
    has_head = hasattr(model, VALUE_HEAD)
    is_classifier = type(model).__name__.endswith("ForSequenceClassification")
    excluded: Any = [*(config.exclude_modules or []), *([VALUE_HEAD] if has_head else [])] or None
    if has_vision(model.config) and not lora.trains_vision:
        excluded = rf"(?!{re.escape(language_model_name(model))}\.).*"
        if config.exclude_modules:
            excluded += rf"|(.*\.)?({'|'.join(map(re.escape, config.exclude_modules))})"
    return peft.LoraConfig(
        task_type="CAUSAL_LM" if not has_head else "SEQ_CLS" if is_classifier else "TOKEN_CLS",
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=config.target_modules,
        exclude_modules=excluded,
        lora_dropout=config.dropout,
        init_lora_weights=True if config.init_method == "kaiming" else config.init_method,
    )


def _load_config(path: str, lora: LoraSpec) -> peft.LoraConfig:
    config = read_config(path, name_source(lora))
    if lora.config.rank and (lora.config.rank, lora.config.alpha) != (config.r, config.lora_alpha):
        raise ConfigError(
            f"{name_source(lora)} has rank {config.r} and alpha {config.lora_alpha}, but "
            f"{lora.key}.rank={lora.config.rank} and {lora.key}.alpha={lora.config.alpha}; use the adapter's values, "
            "or omit both"
        )
    base = config.base_model_name_or_path
    if base and Path(base).resolve() != Path(lora.base_path).resolve():
        logger.warning(
            "%s was trained on %s and continues on %s; if their weights differ, it is another model",
            name_source(lora),
            base,
            lora.base_path,
        )
    config.lora_dropout = lora.config.dropout
    return config


def read_config(path: str, source: str) -> peft.LoraConfig:
    """Return the settings of an adapter in a folder or on the Hub. `source` names it in error messages.

    Raise ConfigError if there are none, or if the adapter does more than add B·A to matrices.
    """
    try:
        config = peft.PeftConfig.from_pretrained(path)
    except Exception as error:  # a malformed file makes peft raise anything
        raise ConfigError(
            f"{source} has no {CONFIG} that peft can read: {error}; use a folder with {CONFIG} and {WEIGHTS}."
            f"{suggest_folder(path)}"
        ) from error
    if not isinstance(config, peft.LoraConfig):
        raise ConfigError(f"{source} is not a LoRA adapter: its peft_type is {config.peft_type}; use one of LoRA")
    # PiSSA moves the largest singular values of a matrix into the adapter and leaves the rest in the base. The adapter
    # means nothing on the original weights. OLoRA, CorDA and LoftQ also change the base. EVA and orthogonal do not.
    method = str(config.init_lora_weights).partition("_")[0].lower()
    changes_base = method in ("pissa", "olora", "corda", "loftq", "lora")
    faults = {
        "use_dora is true": config.use_dora,
        f"bias is {config.bias}": config.bias != "none",
        "lora_bias is true": config.lora_bias,
        f"it has target_parameters {config.target_parameters}": config.target_parameters,
        f"it has modules_to_save {config.modules_to_save}": set(config.modules_to_save or []) - {VALUE_HEAD},
        f"init_lora_weights={config.init_lora_weights} changed the weights of its base": changes_base,
        **{f"it has {name}": getattr(config, name, None) for name in OTHER_KINDS},
    }
    for fault, is_present in faults.items():
        if is_present:
            conversion = (
                ", or convert it (peft: save_pretrained with path_initial_model_for_weight_conversion)"
                if fault.startswith("init_lora_weights=") and not str(config.init_lora_weights).startswith("loftq")
                else ""
            )
            raise ConfigError(
                f"{source} is not a plain LoRA adapter: {fault}; use one that only adds B·A to matrices{conversion}"
            )
    # The file's values replace any initialization. Dropout is a setting of the run (`_load_config`), not of the file.
    config.lora_dropout, config.inference_mode, config.init_lora_weights = 0.0, False, True
    return config


OTHER_KINDS = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config"),
    *("trainable_token_indices", "use_bdlora", "use_qalora", "velora_config"),
)
"""Settings of peft that compute something other than W + B·A."""


def read_tensors(path: str, source: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter in a folder or on the Hub, under their names in peft's files.

    Raise ConfigError if there are none, or if one has NaN or infinite values.
    """
    try:
        tensors: dict[str, torch.Tensor] = peft.load_peft_weights(path, device="cpu")
    except Exception as error:  # peft and the Hub raise anything
        raise ConfigError(f"{source} has no {WEIGHTS} that can be read: {error}; save the adapter again") from error
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise ConfigError(f"{source} has NaN or infinite values in {name}; use an earlier one")
    return tensors


def _check_tensors(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """Raise ConfigError if tensors from peft's files differ from the model's adapter in names or shapes."""
    expected = {_name_in_file(name): parameter for name, parameter in trained_parameters(model).items()}
    # peft saves a copy of the base's matrix next to a head adapter, also if the head is tied
    own = dict(model.named_parameters(remove_duplicate=False))
    copies = {FILE_PREFIX + name: p for name, p in own.items() if ".base_layer." in name}
    expected |= {name: copies[name] for name in copies.keys() & tensors.keys()}
    for name in sorted(expected.keys() | tensors.keys()):
        shapes = [tuple(named[name].shape) if name in named else "none" for named in (tensors, expected)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"{source} does not fit a {type(model).__name__}: its {name} has shape {shapes[0]}, but the model "
                f"needs {shapes[1]}; use an adapter of this model"
            )


def _name_in_file(name: str) -> str:
    return FILE_PREFIX + name.replace(f".{NAME}.", ".")


def _is_router(layer: Any) -> bool:
    """Return True for subclasses of linear layers that compute something else, such as Llama 4's router."""
    base = layer.get_base_layer()
    return (
        isinstance(base, torch.nn.Linear)
        and not isinstance(base, QuantizedLinear)
        and type(base).forward is not torch.nn.Linear.forward
    )


def _check_layers(model: PreTrainedModel, lora: LoraSpec) -> None:
    """Raise ConfigError if an adapter is on a module that is not linear, or on a head that is tied to embeddings."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    layers = adapter_layers(model)
    other = {path for path, layer in layers.items() if isinstance(layer, ParamWrapper) or _is_router(layer)}
    for path, layer in layers.items():
        if path in other:
            linear = {name.rpartition(".")[2] for name in layers.keys() - other}
            raise ConfigError(
                f"{name_source(lora)}: {path} of a mixture of experts is not a linear module, and only those can have "
                f"an adapter; set {lora.key}.target_modules=[{','.join(sorted(linear))}]"
            )
        if NAME not in layer.lora_A:
            raise ConfigError(
                f"{name_source(lora)}: {path} is a {type(layer.get_base_layer()).__name__}, and only linear modules "
                f"can have an adapter; choose among {', '.join(_linear_names(model))}"
            )
        if layer is head and embeddings is not None and layer.weight is embeddings.weight:
            raise ConfigError(
                f"{name_source(lora)}: {path} shares its weight with the embeddings, which an adapter would separate; "
                f"leave it out of {lora.key}.target_modules"
            )


def _linear_names(model: PreTrainedModel) -> list[str]:
    linear = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return sorted({path.rpartition(".")[2] for path in linear if ".lora_" not in path and path != VALUE_HEAD})
