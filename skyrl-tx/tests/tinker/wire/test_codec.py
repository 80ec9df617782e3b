"""Compare messages with the encoders and decoders of the real client."""

import contextlib
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tinker import types as sdk
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types.forward_backward_request import ForwardBackwardRequest
from tx_kit.fake_engine import no_images

from tx.tinker.types import PassResult, Sample, SampleResult, TopLogprobs, UserError
from tx.tinker.wire import codec
from tx.tinker.wire import tinker_pb2 as pb

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)
FLOATS = st.floats(width=32, allow_nan=True)
SMALL = st.integers(1, 4)


@st.composite
def data(draw: st.DrawFn) -> sdk.Datum:
    """Generate data with one target per token or several, of any length."""
    chunks = draw(st.lists(TOKENS, min_size=1, max_size=3))
    shape = (sum(map(len, chunks)), *([draw(SMALL)] if draw(st.booleans()) else []))
    inputs = {
        "target_tokens": draw(hnp.arrays(np.int64, shape, elements=st.integers(0, 2**31 - 1))),
        "weights": draw(hnp.arrays(np.float32, shape, elements=FLOATS)),
    }
    return sdk.Datum(
        model_input=sdk.ModelInput(chunks=[sdk.EncodedTextChunk(tokens=chunk) for chunk in chunks]),
        loss_fn_inputs={name: sdk.TensorData.from_numpy(value) for name, value in inputs.items()},
    )


def datum_of(tokens: list[int], **inputs: Any) -> sdk.Datum:
    return sdk.Datum(model_input=sdk.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def encoded(datums: list[sdk.Datum], config: dict[str, float | str] | None = None, loss_fn: str = "ppo") -> bytes:
    """Encode data with the client."""
    data = sdk.ForwardBackwardInput(data=datums, loss_fn=loss_fn, loss_fn_config=config)
    request = ForwardBackwardRequest(data, model_id="s:train:0", seq_id=3)
    return forward_backward_request_to_proto(request).SerializeToString()


@given(st.lists(data(), max_size=3), st.dictionaries(st.sampled_from(["a", "b"]), st.floats(-9, 9)))
def test_passes_of_the_client_are_decoded(datums: list[sdk.Datum], config: dict[str, float | str]) -> None:
    message = codec.message_from_bytes(encoded(datums, config))
    pass_ = codec.pass_of(message, no_images)
    assert (pass_.model_id, message.seq_id, pass_.loss_fn, pass_.is_forward_only) == ("s:train:0", 3, "ppo", False)
    assert pass_.settings == config
    for ours, theirs in zip(pass_.data, datums, strict=True):
        assert ours.tokens.tolist() == theirs.model_input.to_ints()
        for name, value in theirs.loss_fn_inputs.items():
            np.testing.assert_array_equal(ours.inputs[name], value.to_numpy())


def test_inputs_are_cast_for_backends() -> None:
    datum = datum_of([1, 2], target_tokens=np.array([1, 2]), weights=np.array([0, 1]))
    inputs = codec.pass_of(codec.message_from_bytes(encoded([datum])), no_images).data[0].inputs
    assert (inputs["target_tokens"].dtype, inputs["weights"].dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("n_columns", [1, 40])
def test_sparse_targets_of_the_client_are_decoded(n_columns: int) -> None:
    dense = torch.zeros(5, n_columns, dtype=torch.int64)
    dense[1, 0], dense[4, n_columns - 1] = 7, 9
    message = codec.message_from_bytes(encoded([datum_of([1] * 5, target_tokens=dense, weights=dense.float())]))
    is_sparse = message.data[0].loss_fn_inputs["target_tokens"].WhichOneof("layout") == "sparse_csr"
    assert is_sparse == (n_columns == 40)
    np.testing.assert_array_equal(codec.pass_of(message, no_images).data[0].inputs["target_tokens"], dense.numpy())


@given(st.lists(data(), min_size=1, max_size=3))
def test_json_of_older_clients_is_equivalent(datums: list[sdk.Datum]) -> None:
    as_json = [
        {
            "model_input": {"chunks": [{"tokens": chunk.tokens} for chunk in datum.model_input.chunks]},
            "loss_fn_inputs": {
                name: {"data": value.to_numpy().reshape(-1).tolist(), "dtype": value.dtype, "shape": value.shape}
                for name, value in datum.loss_fn_inputs.items()
            },
        }
        for datum in datums
    ]
    body = json.loads(json.dumps({"data": as_json, "loss_fn": "ppo", "loss_fn_config": {"beta": 0.5}}))
    ours = codec.pass_of(codec.message_from_json("s:train:0", 3, body, is_forward_only=True), no_images)
    theirs = codec.pass_of(codec.message_from_bytes(encoded(datums, {"beta": 0.5})), no_images)
    assert ours.is_forward_only
    assert ours.settings == theirs.settings
    for one, other in zip(ours.data, theirs.data, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        for name in other.inputs:
            np.testing.assert_array_equal(one.inputs[name], other.inputs[name])


ROWS = st.lists(
    st.one_of(
        hnp.arrays(np.float32, st.tuples(SMALL), elements=FLOATS),
        hnp.arrays(np.float32, st.tuples(SMALL, SMALL), elements=FLOATS),
    ),
    max_size=6,
)


@given(ROWS)
def test_the_client_decodes_pass_results(rows: list[np.ndarray]) -> None:
    payload = codec.forward_backward_bytes(PassResult(1.25, rows, [-row for row in rows]))
    read = deserialize_forward_backward_output(payload)
    as_json = json.loads(codec.forward_backward_json(payload))
    assert read.metrics == as_json["metrics"] == {"loss:sum": 1.25}
    assert len(read.loss_fn_outputs) == len(as_json["loss_fn_outputs"]) == len(rows)
    for row, found, row_as_json in zip(rows, read.loss_fn_outputs, as_json["loss_fn_outputs"], strict=True):
        np.testing.assert_array_equal(found["logprobs"].to_numpy(), row)
        np.testing.assert_array_equal(found["elementwise_loss"].to_numpy(), -row)
        assert row_as_json["logprobs"]["shape"] == list(row.shape)
        np.testing.assert_array_equal(np.float32(row_as_json["logprobs"]["data"]).reshape(row.shape), row)


@st.composite
def samples(draw: st.DrawFn) -> SampleResult:
    """Generate results with and without each optional part."""
    n_tokens, k = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    top = TopLogprobs(np.arange(n_tokens * k).reshape(n_tokens, k) + 1, -np.ones((n_tokens, k), np.float32))
    sample = Sample(list(range(n_tokens)), [-0.5] * n_tokens, draw(st.booleans()), top if k else None)
    n_prompt = draw(st.integers(1, 4))
    logprobs = np.array([np.nan] + [-1.0] * (n_prompt - 1), np.float32) if draw(st.booleans()) else None
    top_prompt = TopLogprobs(np.full((n_prompt, 2), 5), np.full((n_prompt, 2), -2.0, np.float32))
    return SampleResult([sample] * draw(SMALL), logprobs, top_prompt if draw(st.booleans()) else None)


@given(samples())
def test_the_client_decodes_samples(result: SampleResult) -> None:
    payload = codec.sample_bytes(result)
    read, result_as_json = deserialize_sample_response(payload), json.loads(codec.sample_json(payload))
    for sample, found, as_json in zip(result.samples, read.sequences, result_as_json["sequences"], strict=True):
        assert found.tokens == as_json["tokens"] == list(sample.tokens)
        assert found.logprobs == as_json["logprobs"] == list(sample.logprobs)
        assert found.stop_reason == as_json["stop_reason"] == ("stop" if sample.is_stopped else "length")
        if sample.top is None:
            assert found.topk_logprobs is None
        else:
            rows = [[list(cell) for cell in row] for row in found.topk_logprobs or []]
            assert rows == as_json["topk_logprobs"]
            assert [[token for token, _ in row] for row in rows] == sample.top.tokens.tolist()
    if result.prompt_logprobs is None:
        assert read.prompt_logprobs is result_as_json.get("prompt_logprobs") is None
    else:
        assert read.prompt_logprobs == result_as_json["prompt_logprobs"]
        assert read.prompt_logprobs is not None
        assert read.prompt_logprobs[0] is None
    if result.top_prompt is not None:
        assert read.topk_prompt_logprobs is not None
        assert read.topk_prompt_logprobs[0] is result_as_json["topk_prompt_logprobs"][0] is None
        assert all(row == [(5, -2.0)] * 2 for row in read.topk_prompt_logprobs[1:])


@given(st.integers(0, 10**6), st.integers(1, 30))
def test_damaged_bytes_are_a_message_or_a_user_error(seed: int, n_changes: int) -> None:
    rng = np.random.default_rng(seed)
    datum = datum_of([1, 2, 3], target_tokens=np.array([1, 2, 3]), weights=np.ones(3, np.float32))
    body = bytearray(encoded([datum, datum], {"a": 1.0}))
    for place in rng.integers(0, len(body), n_changes):
        body[place] = rng.integers(256)
    with contextlib.suppress(UserError):  # no other error may be raised
        codec.pass_of(codec.message_from_bytes(bytes(body)), no_images)


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (pb.Chunk(image=pb.Image(data=b"x", format="png")), r"data\[0\].model_input: no images here"),
        (pb.Chunk(dmel=pb.Dmel(dmel=b"x")), "dmel"),
        (pb.Chunk(), "None"),
        (pb.Chunk(encoded_text=pb.EncodedText(tokens=b"12345")), "5 bytes"),
    ],
)
def test_invalid_chunks(chunk: pb.Chunk, words: str) -> None:
    with pytest.raises(UserError, match=words):
        codec.pass_of(pb.ForwardBackwardRequest(data=[pb.Datum(model_input=[chunk])]), no_images)


def test_text_settings() -> None:
    with pytest.raises(UserError, match=r"loss_fn_config\['kl_coeff'\]='high'"):
        codec.pass_of(codec.message_from_bytes(encoded([], {"kl_coeff": "high"})), no_images)


@pytest.mark.parametrize(
    ("values", "words"), [(np.array([0.5]), "must be int64"), (np.array([1 << 40]), "which is not a token")]
)
def test_invalid_targets(values: np.ndarray, words: str) -> None:
    datum = datum_of([1], target_tokens=sdk.TensorData.from_numpy(values))
    with pytest.raises(UserError, match=words):
        codec.pass_of(codec.message_from_bytes(encoded([datum])), no_images)
