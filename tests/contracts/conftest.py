"""A client of each world of client_worlds.py, and a namespace that no other test has."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.clients import Namespace, NamespaceIdentity

from .client_blocks import GEOMETRY
from .client_worlds import WORLDS, World


@pytest.fixture(params=list(WORLDS))
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with WORLDS[request.param](request) as made:
        yield made


@pytest.fixture
def client(world: World) -> Any:
    return world.client(name="contract")


@pytest.fixture
def model(request: pytest.FixtureRequest) -> bytes:
    """A model of its own for every test: some worlds share one daemon."""
    return hashlib.sha256(request.node.name.encode()).digest()


@pytest.fixture
def namespace(client: Any, model: bytes) -> Namespace:
    found = client.register(NamespaceIdentity(model, GEOMETRY))
    assert isinstance(found, Namespace)
    return found
