"""Models of many architectures with weights from a seed, and a store for each in an appliance of its own."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Before torch is imported: its threads otherwise spin while they wait; nothing is fetched from any hub.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from kvtier.testing import FakeAppliance

BLOCK_TOKENS = 8


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """Return `models.build`."""
    from .models import build

    return build


@pytest.fixture
def appliance() -> Iterator[FakeAppliance]:
    """An appliance in this process; audited at the end."""
    one = FakeAppliance()
    yield one
    assert one.check_integrity() == []


@pytest.fixture
def make_store(appliance: FakeAppliance) -> Iterator[Callable[..., Any]]:
    """Return a function that makes a store for a model in `appliance`."""
    from kvtier.clients.transformers import PrefixStore

    made = []

    def make(model: Any, **settings: Any) -> PrefixStore:
        made.append(PrefixStore(model, appliance.client(), **{"block_tokens": BLOCK_TOKENS, **settings}))
        return made[-1]

    yield make
    for store in made:
        store.close()
