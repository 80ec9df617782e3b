import pytest
import torch
from train_kit.models import CPU, SMALL, create_model
from transformers import PreTrainedModel, Qwen3Config

from skyrl_train.models.fused import fuse_operations
from skyrl_train.models.memory import MAX_ACTIVATION_BYTES, activation_bytes_per_token, default_max_tokens


def make_model(hidden_size: int, n_layers: int) -> PreTrainedModel:
    sizes = {"hidden_size": hidden_size, "intermediate_size": 3 * hidden_size, "head_dim": hidden_size // 4}
    return create_model(Qwen3Config(**SMALL | sizes | {"num_hidden_layers": n_layers}))


def test_larger_models_take_fewer_tokens_at_once() -> None:
    small, medium, large = (
        default_max_tokens(make_model(*sizes).config, CPU) for sizes in ((128, 4), (256, 16), (512, 28))
    )
    assert (small, large) == (8192, 1024)
    assert large < medium < small


@pytest.mark.parametrize("sizes", [(128, 4), (256, 6)])
def test_the_estimate_covers_the_activations(sizes: tuple[int, int]) -> None:
    model, saved = make_model(*sizes), {}
    fuse_operations(model)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    n_tokens = 256
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(input_ids=torch.arange(n_tokens)[None] % 61, use_cache=False)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / n_tokens
    estimate = activation_bytes_per_token(model.config)
    assert measured == pytest.approx(estimate, rel=0.05)
    assert default_max_tokens(model.config, CPU) * estimate <= MAX_ACTIVATION_BYTES
