"""The image that KVTIER_IMAGE names, loaded once; without that variable (`make test-image` sets it) tests are
skipped."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helm.charts import of_kind, render

from .engine import Engine, what_is_missing


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    if "KVTIER_IMAGE" not in os.environ:
        pytest.skip("make test-image")
    if missing := what_is_missing():
        pytest.exit(missing, returncode=1)
    running = Engine(Path(tempfile.mkdtemp(prefix="kvtier-image")))
    try:
        running.do("load", "--input", os.environ["KVTIER_IMAGE"])
        yield running
    finally:
        running.close()


@pytest.fixture(scope="session")
def image(engine: Engine) -> str:
    """The name by which the chart asks for the image by default; it must be what was loaded."""
    [daemonset] = of_kind(render({}), "DaemonSet")
    [container] = daemonset["spec"]["template"]["spec"]["containers"]
    name = f"docker.io/library/{container['image']}"
    engine.do("image", "exists", name)
    return name
