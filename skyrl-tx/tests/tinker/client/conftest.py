"""A server whose engine is a thread of the test, and the real client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tinker
from tx_kit.servers import BASE_MODEL, Running, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.fixture
def service(server: Running) -> Iterator[tinker.ServiceClient]:
    client = server.sdk(user_metadata={"run": "test"})
    yield client
    client.close(status="success")


@pytest.fixture
def rest(server: Running) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key="tml-test")  # pragma: allowlist secret


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=4, user_metadata={"renderer_name": "plain"}).result()
