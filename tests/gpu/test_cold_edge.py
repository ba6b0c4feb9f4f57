"""From nvme into hbm on a real GPU: decoded and hashed there, read back and compared here. Skipped, with the
reason, elsewhere."""

from pathlib import Path

import pytest

from bench.cold_edge import KINDS, MIB, ColdEdgeRig
from kvtier.tiers.gpu.device.contract import Device, DeviceError
from kvtier.tiers.gpu.device.cuda import CudaDevice

pytestmark = pytest.mark.gpu

TOTAL_BYTES = 8 * MIB


@pytest.fixture
def device() -> Device:
    """The first GPU; hbm shuts it down."""
    try:
        return CudaDevice(0)
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_up_is_what_the_store_holds(device: Device, tmp_path: Path, kind: str) -> None:
    rig = ColdEdgeRig(device, tmp_path, TOTAL_BYTES)
    rig.trial.close()
    items = rig.put(kind)
    rig.load(items)
    assert rig.copier.counters["device_faults"] == rig.copier.counters["on_host"] == 0
    for source, target, label in items[::5]:
        wanted, found = (memoryview(bytearray(label.raw_length)) for _ in range(2))
        assert rig.store.read_batch([(source, label, wanted)])[0].cause is None
        rig.engine.fetch(target, found)
        assert found == wanted
    rig.close()
