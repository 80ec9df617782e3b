from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tx_kit.fake_engine import STATE

from tx.tinker.config import TxConfig
from tx.tinker.db_models import EngineState
from tx.tinker.losses import LOSSES, fill_defaults
from tx.tinker.submission.validation import check_base_model, check_lora, check_pass
from tx.tinker.types import Datum, Pass, UserError

ENGINE = EngineState(**STATE)
CONFIG = TxConfig(base_model="org/m", max_lora_rank=8)


def datum(n_tokens: int = 3, **inputs: Any) -> Datum:
    all_inputs = {"target_tokens": np.arange(n_tokens, dtype=np.int32), **inputs}
    return Datum(np.arange(n_tokens, dtype=np.int32), all_inputs)


def check(*data: Datum, loss: str = "cross_entropy", state: EngineState | None = ENGINE, **settings: float) -> None:
    check_pass(Pass("m", data, loss, settings), state)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_required_inputs_of_each_loss_suffice(loss: str) -> None:
    needed = {name: np.zeros(3, np.float32) for name in LOSSES[loss].needs if name != "target_tokens"}
    check(datum(**needed), loss=loss, **LOSSES[loss].settings)
    check(datum(weights=np.ones(3, np.float32), **needed), loss=loss)
    many = np.ones((3, 5), np.int32)
    if loss == "cross_entropy":
        check(datum(target_tokens=many, weights=np.float32(many) * -1e30))
    else:
        with pytest.raises(UserError, match=f"{loss} takes one target per token"):
            check(datum(target_tokens=many, **{name: np.float32(many) for name in needed}), loss=loss)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (datum(0), "model_input is empty"),
        (datum(target_tokens=np.zeros(4, np.int32)), r"target_tokens has shape \[4\] for 3 tokens"),
        (datum(target_tokens=np.zeros((3, 0), np.int32)), "at least one target"),
        (datum(target_tokens=np.zeros((3, 2), np.int32), weights=np.ones(3, np.float32)), r"target_tokens \[3, 2\]"),
        (datum(target_tokens=np.int32([0, 100, 0])), "has token 100; the vocabulary is 0 to 99"),
        (datum(target_tokens=np.int32([0, -1, 0])), "has token -1"),
        (datum(weights=np.float32([0, np.inf, 0])), r"weights\[1\] is inf"),
        (Datum(np.int32([100]), {"target_tokens": np.int32([1])}), r"data\[1\].model_input has token 100"),
    ],
)
def test_invalid_data(one: Datum, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        check(datum(), one)
    assert "data[1]" in str(refused.value)


def test_the_number_of_data_and_tokens() -> None:
    with pytest.raises(UserError, match="data is empty"):
        check()
    with pytest.raises(UserError, match="500 tokens"):
        check(datum(500))
    check(datum(500), state=None)  # limits are unknown before the engine is up


def test_masked_values_may_be_anything() -> None:
    weights = np.float32([1, 0, 1])
    check(datum(target_tokens=np.int32([1, -100, 2]), weights=weights))
    anything = np.float32([0.5, np.nan, -0.5])
    policy = {"logprobs": anything, "advantages": anything}
    check(datum(weights=weights, **policy), loss="ppo")
    with pytest.raises(UserError, match=r"logprobs\[1\] is nan"):
        check(datum(**policy), loss="ppo")


def test_inputs_of_other_losses_and_masks_are_ignored() -> None:
    """Recipes leave them in, whatever their shapes and values are."""
    policy = {"logprobs": np.zeros(3, np.float32), "advantages": np.ones(3, np.float32)}
    left = datum(**policy, mask=np.float32([np.nan]), sequence_ratio_mask=np.zeros((3, 2), np.float32))
    check(left, loss="importance_sampling")
    check(left, loss="cross_entropy")
    whole = fill_defaults(Pass("m", [left], "importance_sampling", {}, is_forward_only=False))
    assert set(whole.data[0].inputs) == {"target_tokens", "logprobs", "advantages", "weights"}
    with pytest.raises(UserError, match="'weight', which no loss uses; cross_entropy uses target_tokens, weights"):
        check(datum(weight=np.ones(3, np.float32)))


@pytest.mark.parametrize(
    ("loss", "settings", "words"),
    [
        ("nonsense", {}, "use one of: cross_entropy, importance_sampling"),
        ("ppo", {"clip": 0.2}, "'clip', which ppo does not support; it supports clip_low_threshold"),
        ("importance_sampling", {"beta": 1.0}, "it supports none"),
        ("ppo", {"clip_low_threshold": float("nan")}, "must be a finite number"),
        ("ppo", {"clip_low_threshold": 1.3}, "clip_low_threshold=1.3 is more than clip_high_threshold=1.2"),
    ],
)
def test_losses_and_settings(loss: str, settings: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(datum(), loss=loss, **settings)


@given(
    st.dictionaries(
        st.sampled_from(["target_tokens", "weights", "logprobs", "advantages", "other"]),
        st.one_of(
            hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=4)),
            hnp.arrays(np.int32, hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=4)),
        ),
    ),
    st.integers(0, 4),
    st.sampled_from(list(LOSSES)),
)
def test_any_tensors_are_valid_or_a_user_error(inputs: dict[str, np.ndarray], n_tokens: int, loss: str) -> None:
    one = Datum(np.zeros(n_tokens, np.int32), inputs)
    try:
        check(one, loss=loss)
    except UserError:
        return
    used = LOSSES[loss].select_inputs(one)
    assert {value.shape for value in used.values()} == {inputs["target_tokens"].shape}
    assert all(np.isfinite(value).all() for name, value in inputs.items() if name == "weights")


def test_names_of_the_base_model(tmp_path: Path) -> None:
    served = TxConfig(base_model=str(tmp_path), served_model_name="org/mine")
    for name in ("org/mine", str(tmp_path), f"{tmp_path}/"):
        check_base_model(name, served)
    with pytest.raises(UserError, match="'org/m' is not served here; this server has 'org/mine'"):
        check_base_model("org/m", served)


@pytest.mark.parametrize(
    ("rank", "trains_any", "words"),
    [(9, True, "limit of 8"), (0, True, "which this backend cannot"), (4, False, "nothing would be trained")],
)
def test_adapters(rank: int, trains_any: bool, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_lora(rank, trains_any=trains_any, config=CONFIG, state=ENGINE)
    check_lora(8, trains_any=True, config=CONFIG, state=ENGINE)
