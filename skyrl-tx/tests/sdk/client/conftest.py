"""Shared fixtures of the client tests. They run in an environment with an SDK and none of our packages (`make
test-tinker`).
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from differences import KEY, client_of, close, new_rest_client
from passes import Server, datum_of


@pytest.fixture(scope="session")
def server() -> Server:
    """The server under test."""
    description = json.loads(Path(os.environ["TX_SDK_SERVER"]).read_text())
    rows = description.pop("data")
    data = [datum_of(one["tokens"], one["targets"], weights=one["weights"]) for one in rows]
    return Server(**description, data=data, logprobs=[np.asarray(one["logprobs"]) for one in rows])


@pytest.fixture(scope="session")
def service(server: Server) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=server.url, api_key=KEY, user_metadata={"from": "matrix"})
    yield client
    close(client)


@pytest.fixture
def new_training(server: Server, service: tinker.ServiceClient) -> Callable[[], tinker.TrainingClient]:
    """Creates adapters that are equal at first."""
    return lambda: client_of(service.create_lora_training_client(server.base_model, rank=4, seed=3))


@pytest.fixture
def training(new_training: Callable[[], tinker.TrainingClient]) -> tinker.TrainingClient:
    return new_training()


@pytest.fixture
def rest(server: Server, service: tinker.ServiceClient) -> Any:
    return new_rest_client(server.url, service)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Record each test's description with its outcome."""
    for item in items:
        item.user_properties.append(("behavior", item.function.__doc__.strip().rstrip(".")))
