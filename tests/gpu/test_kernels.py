"""The kernels on a real GPU, against the same work on the host. Skipped, with the reason, elsewhere.

`compute-sanitizer python -m pytest tests/gpu/test_kernels.py` is how they are checked for stray accesses."""

from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from kvtier.tiers.codecs.base import Shape
from kvtier.tiers.codecs.exact.exponents import Exponents
from kvtier.tiers.codecs.lossy.profile import Profile, uniform_rules
from kvtier.tiers.codecs.lossy.profiled import Profiled
from kvtier.tiers.gpu.decode import digest_kernels, exponent_kernels, quantised_kernels
from kvtier.tiers.gpu.decode.digest import DeviceDigest, digests_of
from kvtier.tiers.gpu.decode.exponents import DeviceExponents
from kvtier.tiers.gpu.decode.quantised import DeviceQuantised
from kvtier.tiers.gpu.decode.records import Record
from kvtier.tiers.gpu.device import launching
from kvtier.tiers.gpu.device.contract import CopyPieces, Device, DeviceError, Stream
from kvtier.tiers.gpu.device.cuda import CudaDevice
from kvtier.tiers.gpu.pages import kernels
from kvtier.tiers.gpu.pages.kernels import PieceKernel

from ..waiting import until

pytestmark = pytest.mark.gpu

SHAPES = [Shape(1, 2, 16, 8, 128, "bfloat16"), Shape(3, 2, 16, 2, 72, "bfloat16")]
COUNT = 64


@pytest.fixture
def device() -> Iterator[Device]:
    """The first GPU."""
    try:
        opened = CudaDevice(0)
    except DeviceError as error:
        pytest.skip(str(error))
    yield opened
    opened.shut_down()


def finish(device: Device, stream: Stream) -> None:
    """Wait until a stream has done what it was given."""
    event = stream.record()
    until(event.is_done, "the device does not answer", pause_s=1e-4)
    device.recycle(event)


def values_of(shape: Shape, seed: int) -> bytes:
    """Ordinary KV, with a hundredth of it far outside the window."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, shape.num_values) * np.where(rng.random(shape.num_values) < 0.01, 1e-9, 1.0)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_exponents_decode_to_the_hosts_bits(device: Device, shape: Shape) -> None:
    launch = launching.load(device, exponent_kernels.SOURCE, exponent_kernels.NAMES)
    assert launch is not None, "the kernels must compile where there is a GPU"
    decoder, codec = DeviceExponents(device, launch), Exponents()
    stream = device.take_stream()
    stored_bytes = 2 * shape.raw_bytes  # room for any number of exceptions
    stored = np.zeros((COUNT, stored_bytes), np.uint8)  # what the host encodes
    raw = np.zeros((COUNT, shape.raw_bytes), np.uint8)  # what the device decodes
    payloads = [values_of(shape, seed) for seed in range(COUNT)]
    for i, payload in enumerate(payloads):
        codec.encode(shape, memoryview(payload), stored[i].data)
    places = [device.register_host(array.data.cast("B"), is_read_only=False) for array in (stored, raw)]
    ends = [(places[0] + i * stored_bytes, places[1] + i * shape.raw_bytes) for i in range(COUNT)]
    records = [Record(source, stored_bytes, target) for source, target in ends]
    ticket = decoder.decode(stream, codec, shape, records)
    assert ticket is not None
    finish(device, stream)
    assert not ticket.results().any()
    assert [row.tobytes() for row in raw] == payloads
    decoder.slabs.close()
    for place in places:
        device.unregister_host(place)
    device.give_stream(stream)


@pytest.mark.parametrize("length", [16, 20, 333, 4096])
def test_pieces_by_the_kernel(device: Device, length: int) -> None:
    launch = kernels.load(device)
    assert launch is not None
    rng = np.random.default_rng(length)
    source = np.frombuffer(bytearray(rng.bytes(COUNT * 2 * length)), np.uint8)
    target = np.zeros(COUNT * length, np.uint8)
    addresses = [device.register_host(array.data, is_read_only=False) for array in (source, target)]
    offsets = np.arange(COUNT, dtype=np.uint64) * np.uint64(length)
    shuffled = np.uint64(addresses[1]) + rng.permutation(offsets)
    kernel = PieceKernel(device, launch)
    stream = device.take_stream()
    sources = np.uint64(addresses[0]) + np.uint64(2) * offsets
    kernel.copy(stream, CopyPieces(sources, shuffled, np.full(COUNT, length)))
    finish(device, stream)
    for begin, end in zip(2 * offsets, shuffled - np.uint64(addresses[1]), strict=True):
        assert (target[int(end) : int(end) + length] == source[int(begin) : int(begin) + length]).all()
    kernel.close()
    for address in addresses:
        device.unregister_host(address)
    device.give_stream(stream)


@pytest.mark.parametrize("length", [248, 1024, 65536, (1 << 20) + 24])
def test_the_digest_is_the_hosts(device: Device, length: int) -> None:
    launch = launching.load(device, digest_kernels.SOURCE, digest_kernels.NAMES)
    assert launch is not None, "the kernels must compile where there is a GPU"
    digest = DeviceDigest(device, launch)
    data = np.frombuffer(bytearray(np.random.default_rng(length).bytes(COUNT * length)), np.uint8)
    address = device.register_host(data.data, is_read_only=False)
    memory = device.allocate(data.nbytes)
    stream = device.take_stream()
    columns = ([address], [memory.address], [data.nbytes])
    stream.copy(CopyPieces(*(np.array(column, kind) for column, kind in zip(columns, "QQq", strict=True))))
    ticket = digest.digest(stream, [memory.address + i * length for i in range(COUNT)], length)
    finish(device, stream)
    assert ticket is not None
    wanted = [xxhash.xxh3_128_digest(data[i * length :][:length].tobytes()) for i in range(COUNT)]
    assert digests_of(ticket) == wanted
    digest.slabs.close()
    device.free(memory)
    device.unregister_host(address)
    device.give_stream(stream)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_quantised_records_decode_to_the_hosts_bits(device: Device, bits: int, dtype: str) -> None:
    """Of random records, too: every code, and scales of every size."""
    launch = launching.load(device, quantised_kernels.SOURCE, quantised_kernels.NAMES)
    assert launch is not None, "the kernels must compile where there is a GPU"
    shape = Shape(2, 2, 16, 8, 128, dtype)
    codec = Profiled(Profile(bytes(32), 2, 8, 128, 2, dtype, uniform_rules(2, 2, 8, "int", bits)))
    stored_bytes = -(-codec.stored_bound(shape) // 8) * 8
    words = np.random.default_rng(bits).integers(0, 1 << 16, (COUNT, stored_bytes // 2), np.uint16)
    stored = (words & 0xFBFF).view(np.uint8)  # finite scales
    wanted, raw = (np.zeros((COUNT, shape.raw_bytes), np.uint8) for _ in range(2))
    for i in range(COUNT):
        codec.decode(shape, stored[i].data, wanted[i].data)
    places = [device.register_host(array.data.cast("B"), is_read_only=False) for array in (stored, raw)]
    decoder = DeviceQuantised(device, launch)
    stream = device.take_stream()
    ends = [(places[0] + i * stored_bytes, places[1] + i * shape.raw_bytes) for i in range(COUNT)]
    records = [Record(source, stored_bytes, target) for source, target in ends]
    ticket = decoder.decode(stream, codec, shape, records)
    finish(device, stream)
    assert ticket is not None
    assert not ticket.results().any()
    assert (raw == wanted).all()
    decoder.slabs.close()
    for place in places:
        device.unregister_host(place)
    device.give_stream(stream)
