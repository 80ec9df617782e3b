import pytest
from train_kit.models import OTHER_ARCHITECTURES, create_model
from transformers import PreTrainedModel

from skyrl_train.models.attributes import crossing_windows


def read_windows(model: PreTrainedModel) -> list[int | None]:
    return [model.config.sliding_window, *(layer.self_attn.sliding_window for layer in model.base_model.layers)]


@crossing_windows
def fail(model: PreTrainedModel) -> None:
    raise ValueError(f"probed with {read_windows(model)}")


@pytest.mark.parametrize(("window", "copy", "probed"), [(64, 64, (4, 4)), (64, 65, (64, 65)), (3, 3, (3, 3))])
def test_windows_are_small_in_a_probe_unless_layers_differ(window: int, copy: int, probed: tuple[int, int]) -> None:
    model = create_model(OTHER_ARCHITECTURES["gemma2"])
    model.config.sliding_window, model.base_model.layers[0].self_attn.sliding_window = window, copy
    with pytest.raises(ValueError, match=rf"probed with \[{probed[0]}, {probed[1]}, None\]"):
        fail(model)
    assert read_windows(model) == [window, copy, None], "restored even after an error"
