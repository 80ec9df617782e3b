"""Generate unusual requests: anything that a schema permits, mutated valid requests, and random bytes.

Regular tests send a few hundred. TX_FUZZ_EXAMPLES=10000 sends that many, different in every run.
"""

import json
import os
import re
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import httpx
import numpy as np
import yaml
import zstandard
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tx.tinker.losses import LOSSES
from tx.tinker.wire import codec
from tx.tinker.wire import tinker_pb2 as pb
from tx_kit.servers import BASE_MODEL, new_model, new_sampler, new_session

EXAMPLES = int(os.environ.get("TX_FUZZ_EXAMPLES", "0"))
PROTOBUF, JSON = "application/x-protobuf", "application/json"
Strategy = st.SearchStrategy[Any]


def n_requests(n_examples: int) -> int:
    """Return the number of requests: TX_FUZZ_EXAMPLES, or the default."""
    return EXAMPLES or n_examples


def fuzzed(n_examples: int) -> Callable[[Any], Any]:
    """Configure a test for a number of requests; without TX_FUZZ_EXAMPLES, they are deterministic."""
    return settings(
        max_examples=n_examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=settings.default.derandomize and not EXAMPLES,
        database=None,
    )


@dataclass(frozen=True)
class Post:
    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


# -- values

HUGE = [2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**12, 10**400]
FLOATS = [float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 1e-50, -0.0]
DEEP = "\x00deep\x00"  # placeholder for deeply nested JSON
DEPTHS = st.sampled_from([10, 200, 1000, 100_000])
WORDS = ["", "\0", "a\0b", "\ud800", "\U0010ffff", "‮", "../../etc/passwd", "%2e%2e%2f", "x" * 5000, "null", DEEP]
PATHS = [f"tinker://{path}/weights/x" for path in ("a:train:0", "", "a:train:99999999999")]
WORDS += [*PATHS, "tinker://../weights/..", "/etc/passwd", "file:///etc/passwd"]
LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.integers(-2, 5), st.integers(), st.sampled_from(HUGE)),
    *(st.floats(), st.sampled_from(FLOATS), st.text(max_size=5), st.sampled_from(WORDS)),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def shaped_like(schema: dict[str, Any], known: dict[str, Any], names: Strategy) -> Strategy:
    """Generate values that roughly fit a schema, and sometimes other values; `names` are ids of existing objects."""
    if "$ref" in schema:
        return shaped_like(known[schema["$ref"].rsplit("/", 1)[-1]], known, names)
    if "anyOf" in schema:
        return st.one_of(*(shaped_like(one, known, names) for one in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    plain = _plain(schema, known, names)
    return st.one_of(plain, plain, plain, plain, plain, VALUES)


def _plain(schema: dict[str, Any], known: dict[str, Any], names: Strategy) -> Strategy:
    kind = schema.get("type")
    if kind == "array":
        return st.lists(shaped_like(schema.get("items", {}), known, names), max_size=3)
    if kind == "object" and "properties" in schema:
        fields = {name: shaped_like(one, known, names) for name, one in schema["properties"].items()}
        required = {name: fields.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(required, optional=fields)
    return {
        "string": names | st.text(max_size=4) | st.sampled_from(WORDS),
        "integer": st.integers(-1, 5) | st.integers() | st.sampled_from(HUGE),
        "number": st.floats() | st.floats(0, 1) | st.sampled_from(FLOATS),
        "boolean": st.booleans(),
        "null": st.none(),
    }.get(kind or "", VALUES)


def rarely(draw: st.DrawFn, n: int) -> bool:
    """Return True once in `n` cases, but not in the simplest one."""
    return draw(st.integers(0, n - 1)) == n // 2


# -- JSON


def written(value: Any, depth: int) -> bytes:
    """Serialize to JSON, extended by NaN, unpaired surrogates and deep nesting."""
    return json.dumps(value).replace(json.dumps(DEEP), "[" * depth + "]" * depth).encode()


@st.composite
def mutated(draw: st.DrawFn, value: Any, names: Sequence[str]) -> Any:
    """Replace a part of a valid value, mostly by one of the same type."""
    if isinstance(value, dict) and value and not rarely(draw, 30):
        key = draw(st.sampled_from(sorted(value)))
        if rarely(draw, 10):
            return {name: one for name, one in value.items() if name != key}
        return {**value, key: draw(mutated(value[key], names))}
    if isinstance(value, list) and value and not rarely(draw, 8):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], draw(mutated(value[index], names)), *value[index + 1 :]]
    return draw(VALUES if rarely(draw, 5) else _of_kind(value, names))


def _of_kind(value: Any, names: Sequence[str]) -> Strategy:
    """Generate a value of the same type."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.integers(-2, 70) | st.integers(0, 2**31 - 1) | st.sampled_from(HUGE)
    if isinstance(value, float):
        return st.floats(0, 1) | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(FLOATS)
    if isinstance(value, str):
        return st.sampled_from(names) | st.sampled_from(WORDS) | st.text(max_size=20)
    if isinstance(value, list):
        return st.sampled_from([[], value * 2, value * 1000])
    return st.dictionaries(st.text(max_size=5), VALUES, max_size=3)


@st.composite
def broken(draw: st.DrawFn, body: bytes) -> bytes:
    if not body or draw(st.booleans()):
        return body[: draw(st.integers(0, len(body)))]
    start = draw(st.integers(0, len(body) - 1))
    inserted = [b"", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\0", b'"', b"}", b"1e999999", b"9" * 5000]
    return body[:start] + draw(st.sampled_from(inserted)) + body[start + draw(st.integers(0, 3)) :]


# -- protobuf


def valid_pass(model_id: str) -> pb.ForwardBackwardRequest:
    data = []
    for n_tokens in (3, 5):
        target = {"data": list(range(n_tokens)), "dtype": "int64", "shape": [n_tokens]}
        weights = {"data": [1.0] * n_tokens, "dtype": "float32", "shape": [n_tokens]}
        inputs = {"target_tokens": target, "weights": weights}
        data.append({"model_input": {"chunks": [{"tokens": target["data"]}]}, "loss_fn_inputs": inputs})
    fields = {"data": data, "loss_fn": "cross_entropy"}
    return codec.message_from_json(model_id, None, fields, is_forward_only=False)


@st.composite
def wrong_tensor(draw: st.DrawFn, tensor: pb.Tensor) -> None:
    part = draw(st.sampled_from(["dense", "sparse", "dtype", "shape", "nothing"]))
    numbers = draw(st.lists(st.sampled_from([0, 1, 2, -1, 2**31, 2**62, -(2**63)]), max_size=4))
    if part == "dense":
        kind = draw(st.sampled_from(["<f4", "<i8", "<i4"]))
        values = draw(st.lists(st.sampled_from([0.0, 1.0, -1.0, 1e38, *FLOATS]), max_size=5))
        with np.errstate(all="ignore"):
            tensor.dense = np.array(values, "<f8").astype(kind).tobytes() + draw(st.binary(max_size=3))
    elif part == "sparse":
        packed = np.array(numbers, "<i8").tobytes()
        tensor.sparse_csr.values, tensor.sparse_csr.crow_indices = draw(st.binary(max_size=16)), packed
        tensor.sparse_csr.col_indices = draw(st.sampled_from([packed, b"", b"\0" * 8]))
    elif part == "dtype":
        tensor.dtype = draw(st.sampled_from([0, 1, 2, 3, 4, 99]))
    elif part == "shape":
        del tensor.shape[:]
        tensor.shape.extend(numbers)


@st.composite
def passes(draw: st.DrawFn, model_ids: Sequence[str]) -> bytes:
    message = valid_pass(draw(st.sampled_from(model_ids)))
    message.seq_id = draw(st.sampled_from([0, 1, 2, -1, 2**31 - 1]))
    message.forward_only = draw(st.booleans())
    message.loss_fn = draw(st.sampled_from([*LOSSES, ""]))
    for name in draw(st.lists(st.sampled_from(["clip_low_threshold", "beta", "\0", "x" * 999]), max_size=2)):
        message.loss_fn_config[name] = draw(st.floats())
    datum = message.data[draw(st.integers(0, 1))]
    inputs = st.sampled_from(["target_tokens", "weights", "logprobs", "advantages", "x"])
    for name in draw(st.lists(inputs, max_size=2)):
        draw(wrong_tensor(datum.loss_fn_inputs[name]))
    tokens = draw(st.lists(st.sampled_from([0, 1, 63, 64, 10**6, -1, 2**31 - 1, -(2**31)]), max_size=5))
    if draw(st.booleans()):
        datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes() + draw(st.binary(max_size=2))
    if rarely(draw, 10):
        datum.model_input.add().image.data = b"no picture"
    body = message.SerializeToString()
    return draw(broken(body)) if rarely(draw, 4) else body


# -- encodings

BOMB = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))
ENDLESS = b"\x28\xb5\x2f\xfd\x00\xf8" + b"\x02\xff\xff\xff" * 100  # claims a window of terabytes, and runs of zeros


@st.composite
def encoded(draw: st.DrawFn, body: bytes) -> tuple[bytes, dict[str, str]]:
    """Compress a body, correctly or not, or mislabel it."""
    packed = zstandard.ZstdCompressor(level=1).compress(body)
    content = draw(st.sampled_from([packed, packed[:-3], packed + packed, packed + b"x", BOMB, ENDLESS, body]))
    name = draw(st.sampled_from(["zstd", "zstd", "zstd", "ZSTD", "gzip", "identity", "zstd, zstd", ""]))
    return content, {"Content-Encoding": name}


# -- valid requests


def settle(http: httpx.Client) -> dict[str, str]:
    """Create a session with a model, a sampler and a request; return their ids, and the path of a checkpoint."""
    with http:
        session_id = new_session(http)
        request_id = new_model(http, session_id).json()["request_id"]
        sampler_id = new_sampler(http, session_id)
    ids = {"session": session_id, "model": f"{session_id}:train:0", "request": request_id, "sampler": sampler_id}
    return {**ids, "path": f"tinker://{ids['model']}/weights/there"}


def valid_bodies(mine: dict[str, str]) -> dict[str, Any]:
    """Return a valid body for some paths."""
    text = Path(__file__).with_name("bodies.yaml").read_text("utf-8")
    bodies = yaml.safe_load(Template(text).substitute(mine, base=BASE_MODEL))
    return {f"/api/v1/{path}": body for path, body in bodies.items()}


# -- whole requests

SEGMENTS = ["-1", "९", "*", "a:train:0", "weights/x", "weights/../../x", "sampler_weights/..%2f..%2fx", "..", "%2e%2e"]
SEGMENTS += ["../../../../etc/passwd", "%00", "%ff%fe", "%ed%a0%80", "a" * 8000]
QUERIES = ["", "?limit=-1", "?limit=99999999999999999999&offset=1", "?offset=nan", "?project_id=%00", "?limit=%ff"]
METHODS = ["get", "head", "put", "delete", "options", "trace", "brew"]
CONTENT_TYPES = ["", "text/plain", PROTOBUF, JSON + "; charset=utf-16", "a/b;;=,"]


@st.composite
def addressed(draw: st.DrawFn, path: str, names: Sequence[str]) -> str:
    def segment(_: object) -> str:
        text = draw(st.sampled_from([*SEGMENTS, *names]))
        return text if draw(st.booleans()) else urllib.parse.quote(text, safe="%")

    return re.sub(r"\{[^}]*\}", segment, path) + draw(st.sampled_from([*QUERIES, "?&&=="]))


@dataclass(frozen=True)
class Surface:
    """All endpoints of a server, from its own description."""

    schemas: dict[str, Any]
    bodies: dict[tuple[str, str], dict[str, Any]]  # schemas by method and path
    paths: list[tuple[str, str]]

    @classmethod
    def of(cls, description: dict[str, Any]) -> "Surface":
        known, bodies, paths = dict(description["components"]["schemas"]), {}, []
        for path, methods in description["paths"].items():
            for method, one in methods.items():
                paths.append((method, path))
                schema = one.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema")
                if schema is not None:
                    bodies[method, path] = schema
                    known |= schema.get("$defs", {})
        return cls(known, bodies, sorted(paths))


@st.composite
def posts(
    draw: st.DrawFn, surface: Surface, valid: dict[str, Any], names: Sequence[str], expendable: Sequence[str]
) -> Post:
    """Generate a request. `valid` has valid bodies for some paths, `names` are ids of existing objects, and
    `expendable` are the ids that may be ended.
    """
    kind = draw(st.sampled_from(["schema", *["mutated"] * 6, "pass", "pass", "address", "broken"]))
    method, headers = "post", {"Content-Type": JSON}
    if kind == "address":
        method, path = draw(st.sampled_from(surface.paths))
        method = draw(st.sampled_from(METHODS)) if rarely(draw, 3) else method
        return Post(method, draw(addressed(path, expendable)), draw(st.sampled_from([b"", b"{}"])), headers)
    if kind == "pass":
        path = "/api/v1/" + draw(st.sampled_from(["forward_backward", "forward"]))
        body, headers = draw(passes([name for name in names if ":train:" in name])), {"Content-Type": PROTOBUF}
    elif kind == "schema":
        method, path = draw(st.sampled_from(sorted(surface.bodies)))
        value = draw(shaped_like(surface.bodies[method, path], surface.schemas, st.sampled_from(expendable)))
        body = written(value, draw(DEPTHS))
    else:
        path = draw(st.sampled_from(sorted(valid)))
        value = draw(mutated(valid[path], names)) if kind == "mutated" else valid[path]
        body = written(value, draw(DEPTHS))
        body = draw(broken(body)) if kind == "broken" else body
    if rarely(draw, 20):
        headers["Content-Type"] = draw(st.sampled_from(CONTENT_TYPES))
    if rarely(draw, 20):
        body, more = draw(encoded(body))
        headers |= more
    return Post(method, draw(addressed(path, expendable)) if "{" in path else path, body, headers)
