"""Convert passes and samples to and from clients' protobuf messages, and the JSON of clients before 0.25.

The codec checks sizes, layouts and dtypes. `validation` checks whether a model can be trained on the data.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from tx.tinker.types import Datum, Pass, PassResult, ReadImage, SampleResult, TopLogprobs, UserError
from tx.tinker.wire import tinker_pb2 as pb
from tx.tinker.wire.chunks import chunk_from_json, decode_chunk, join_parts
from tx.tinker.wire.tensors import INT32_RANGE, check_sparse, dense_array, json_array, tensor_from_json

OUTPUT_TYPE = "scalar"
LOSS_SUM = "loss:sum"
NO_LOGPROB = -99999.0
"""Log-prob of an empty cell. The cell's token is 0."""


def message_from_bytes(payload: bytes) -> pb.ForwardBackwardRequest:
    """Parse a client's message, or the payload of a `FORWARD_BACKWARD` request.

    Raises:
        UserError: the bytes are not such a message.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise UserError(f"the body of {len(payload)} bytes is not a ForwardBackwardRequest: {error}") from error
    return message


def message_from_json(
    model_id: str, seq_id: int | None, fields: Mapping[str, Any], *, is_forward_only: bool
) -> pb.ForwardBackwardRequest:
    """Build the message from the `forward_backward_input` of an older client.

    Raises:
        UserError: a tensor or a chunk is invalid.
    """
    message = pb.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id or 0, loss_fn=fields["loss_fn"], forward_only=is_forward_only
    )
    for name, value in (fields.get("loss_fn_config") or {}).items():
        field = "text" if isinstance(value, str) else "number"
        setattr(message.loss_fn_config_v2[name], field, value)
    for number, datum in enumerate(fields["data"]):
        added = message.data.add()
        for chunk in datum["model_input"]["chunks"]:
            added.model_input.append(chunk_from_json(chunk, f"data[{number}].model_input"))
        for name, tensor in datum["loss_fn_inputs"].items():
            added.loss_fn_inputs[name].CopyFrom(tensor_from_json(tensor, f"data[{number}].loss_fn_inputs[{name!r}]"))
    return message


def pass_of(message: pb.ForwardBackwardRequest, read_image: ReadImage, max_context: int | None = None) -> Pass:
    """Convert a message to a pass. Images that would end after `max_context` tokens are not read.

    Raises:
        UserError: a chunk or an image is invalid, or a tensor is inconsistent, or the tensors are too large.
    """
    check_sparse(tensor for datum in message.data for tensor in datum.loss_fn_inputs.values())
    settings = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise UserError(f"loss_fn_config[{name!r}]={value.text!r} must be a number")
        settings[name] = value.number
    data = [_datum(datum, read_image, max_context, f"data[{number}]") for number, datum in enumerate(message.data)]
    return Pass(message.model_id, data, message.loss_fn, settings, is_forward_only=message.forward_only)


def _datum(message: pb.Datum, read_image: ReadImage, max_context: int | None, name: str) -> Datum:
    where = f"{name}.model_input"
    parts = (decode_chunk(chunk, where) for chunk in message.model_input)
    tokens, images = join_parts(parts, read_image, where, max_context)
    inputs = {
        key: _loss_input(key, dense_array(tensor, f"{name}.loss_fn_inputs[{key!r}]"), name)
        for key, tensor in message.loss_fn_inputs.items()
    }
    return Datum(tokens, inputs, images)


def _loss_input(key: str, values: np.ndarray, name: str) -> np.ndarray:
    """Cast an input: targets to token ids, everything else to floats, whatever dtype was sent."""
    if key != "target_tokens":
        return values.astype(np.float32, copy=False)
    if values.dtype.kind != "i":
        raise UserError(f"{name}.loss_fn_inputs['target_tokens'] is {values.dtype}, and must be int64")
    if values.size and not (INT32_RANGE[0] <= values.min() and values.max() <= INT32_RANGE[1]):
        raise UserError(f"{name}.loss_fn_inputs['target_tokens'] has {values.max()}, which is not a token")
    return values.astype(np.int32, copy=False)


def forward_backward_bytes(result: PassResult) -> bytes:
    """Serialize a `ForwardBackwardOutput` with fields `logprobs` and `elementwise_loss`, and the metric `loss:sum`."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE)
    message.metrics[LOSS_SUM] = result.loss
    rows = zip(result.logprobs, result.token_losses, strict=True)
    for trailing, same in groupby(rows, key=lambda row: row[0].shape[1:]):  # all rows of a record have the same width
        logprobs, losses = zip(*same, strict=True)
        record = message.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(logprobs))
        record.fields["logprobs"].CopyFrom(_to_batched(logprobs, trailing))
        record.fields["elementwise_loss"].CopyFrom(_to_batched(losses, trailing))
    return message.SerializeToString(deterministic=True)


def _to_batched(rows: Sequence[np.ndarray], trailing: Sequence[int]) -> pb.BatchedTensor:
    packed = [np.ascontiguousarray(row, dtype="<f4").tobytes() for row in rows]
    offsets = np.cumsum([0, *(len(row) for row in packed)], dtype="<i8")
    return pb.BatchedTensor(
        data=b"".join(packed), offsets=offsets.tobytes(), dtype=pb.DTYPE_FLOAT32, trailing_shape=trailing
    )


def forward_backward_json(payload: bytes) -> bytes:
    """Convert the output of `forward_backward_bytes` to JSON."""
    message = pb.ForwardBackwardOutput.FromString(payload)
    outputs: list[dict[str, Any]] = []
    for record in message.loss_fn_outputs:
        columns = {name: _from_batched(field) for name, field in record.fields.items()}
        outputs += [
            {name: json_array(column[number]) for name, column in columns.items()}
            for number in range(record.num_datums)
        ]
    fields = {"loss_fn_output_type": message.loss_fn_output_type, "loss_fn_outputs": outputs}
    return json.dumps({**fields, "metrics": dict(message.metrics)}).encode()


def _from_batched(field: pb.BatchedTensor) -> list[np.ndarray]:
    ends = np.frombuffer(field.offsets, "<i8")
    values = np.frombuffer(field.data, "<f4")
    shape = (-1, *field.trailing_shape)
    return [values[start // 4 : end // 4].reshape(shape) for start, end in pairwise(ends)]


def sample_bytes(result: SampleResult) -> bytes:
    """Serialize a `SampleResponse`."""
    message = pb.SampleResponse()
    for sample in result.samples:
        reason = pb.STOP_REASON_STOP if sample.is_stopped else pb.STOP_REASON_LENGTH
        message.sequences.add(
            stop_reason=reason,
            tokens=np.asarray(sample.tokens, "<i4").tobytes(),
            logprobs=np.asarray(sample.logprobs, "<f4").tobytes(),
            topk_sampled_logprobs=None if sample.top is None else _topk(sample.top, n_empty=0),
        )
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(result.prompt_logprobs, "<f4").tobytes()
    if result.top_prompt is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(result.top_prompt, n_empty=1))
    return message.SerializeToString(deterministic=True)


def _topk(top: TopLogprobs, *, n_empty: int) -> pb.TopkLogprobs:
    """Serialize the most likely tokens. The first `n_empty` rows are filled with empty cells."""
    logprobs = np.array(top.logprobs, "<f4")
    is_empty = ~np.isfinite(logprobs)
    is_empty[:n_empty] = True
    n_rows, k = logprobs.shape
    return pb.TopkLogprobs(
        token_ids=np.where(is_empty, 0, top.tokens).astype("<i4").tobytes(),
        logprobs=np.where(is_empty, np.float32(NO_LOGPROB), logprobs).tobytes(),
        k=k,
        length=n_rows,
    )


def sample_json(payload: bytes) -> bytes:
    """Convert the output of `sample_bytes` to JSON."""
    message = pb.SampleResponse.FromString(payload)
    fields: dict[str, Any] = {
        "type": "sample",
        "sequences": [_json_sequence(sequence) for sequence in message.sequences],
    }
    if message.HasField("prompt_logprobs"):
        logprobs = np.frombuffer(message.prompt_logprobs, "<f4")
        fields["prompt_logprobs"] = [None if np.isnan(value) else float(value) for value in logprobs]
    if message.HasField("topk_prompt_logprobs"):
        fields["topk_prompt_logprobs"] = _json_topk(message.topk_prompt_logprobs)
    return json.dumps(fields).encode()


def _json_sequence(sequence: pb.SampledSequence) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "stop_reason": "stop" if sequence.stop_reason == pb.STOP_REASON_STOP else "length",
        "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
        "logprobs": np.frombuffer(sequence.logprobs, "<f4").tolist(),
    }
    if sequence.HasField("topk_sampled_logprobs"):
        fields["topk_logprobs"] = _json_topk(sequence.topk_sampled_logprobs)
    return fields


def _json_topk(top: pb.TopkLogprobs) -> list[list[tuple[int, float]] | None]:
    shape = (top.length, top.k)
    tokens = np.frombuffer(top.token_ids, "<i4").reshape(shape).tolist()
    logprobs = np.frombuffer(top.logprobs, "<f4").reshape(shape).tolist()
    rows = [
        [cell for cell in zip(*row, strict=True) if cell != (0, NO_LOGPROB)]
        for row in zip(tokens, logprobs, strict=True)
    ]
    return [row or None for row in rows]
