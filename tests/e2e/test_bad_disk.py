"""Damaged files between two lives, and full disks: right bytes or misses, counted, and a daemon that serves.

The formats are attacked one by one in tests/tiers/cold/test_damage.py; here the whole daemon meets the
same damage, and a real file system without room: tmpfs (no O_DIRECT: the buffered way) and a loop-mounted
ext4, where this process may mount.
"""

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.appliance.host import process
from kvtier.tiers.cold.segment_files import segment_path
from kvtier.v1 import kvcache_pb2 as pb

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..appliance.raw_client import RawClient, chain
from ..daemon import Daemon
from .scene import BLOCK_BYTES, HEADS, read_in_place

NUM_CHAINS, NUM_BLOCKS = 8, 16  # 4 MiB in segments of 1 MiB
CHAIN_BYTES = NUM_BLOCKS * BLOCK_BYTES
MIB = 1 << 20


def payload(number: int) -> bytes:
    """Bytes of one chain; every block differs from every other."""
    return random.Random(f"chain {number}").randbytes(CHAIN_BYTES)


def connected(served: DaemonThread) -> RawClient:
    client = RawClient(served.daemon.service.facts.local_socket_path)
    client.attach()
    return client


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cold store that a daemon left behind cleanly: NUM_CHAINS chains in sealed segments."""
    folder = tmp_path_factory.mktemp("golden")
    with DaemonThread(small_settings(folder, nvme=True)) as served:
        with connected(served) as client:
            namespace = client.register(heads=HEADS)
            for number in range(NUM_CHAINS):
                outcomes = client.put(namespace, chain(NUM_BLOCKS, f"c{number}"), payload(number))
                assert outcomes == bytes([pb.PUT_OUTCOME_STORED]) * NUM_BLOCKS
        served.wait(served.daemon.drain(60.0))
    return folder / "nvme"


# ------------------------------------------------------------------------------- damage to a directory


def sealed(directory: Path) -> list[Path]:
    """Return the segment files that hold records, in order."""
    paths = [segment_path(directory, number) for number in range(32)]
    return [path for path in paths if path.read_bytes()[:4096].strip(b"\0")]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def flip_payload(directory: Path) -> None:
    for path in sealed(directory):
        flip(path, 4096 + 1000)


def flip_headers(directory: Path) -> None:
    for path in sealed(directory):
        flip(path, 60)


def flip_everywhere(directory: Path) -> None:
    dice = random.Random(5)
    for path in sealed(directory):
        for _ in range(40):
            flip(path, dice.randrange(path.stat().st_size))


def truncate_halves(directory: Path) -> None:
    for path in sealed(directory):
        os.truncate(path, path.stat().st_size // 2)


def truncate_oddly(directory: Path) -> None:
    os.truncate(sealed(directory)[0], 123_457)


def empty_all(directory: Path) -> None:
    for path in sealed(directory):
        os.truncate(path, 0)


def swap(directory: Path) -> None:
    first, second = sealed(directory)[:2]
    other = first.with_name("other")
    first.rename(other)
    second.rename(first)
    other.rename(second)


def duplicate(directory: Path) -> None:
    first, second = sealed(directory)[:2]
    shutil.copyfile(first, second)


def swap_payloads(directory: Path) -> None:
    """Exchange the payloads of two records and leave their headers: only the checksum can tell."""
    path = sealed(directory)[0]
    data = bytearray(path.read_bytes())
    record = 4096 + BLOCK_BYTES // 2
    one, two = slice(4096, record), slice(record + 4096, 2 * record)
    data[one], data[two] = data[two], data[one]
    path.write_bytes(data)


def delete(directory: Path) -> None:
    sealed(directory)[1].unlink()


def lose_manifests(directory: Path) -> None:
    for path in directory.glob("manifest.*"):
        path.unlink()


def truncate_manifests(directory: Path) -> None:
    for path in directory.glob("manifest.*"):
        os.truncate(path, path.stat().st_size * 2 // 3)


def noise(directory: Path) -> None:
    for path in sealed(directory):
        path.write_bytes(random.Random(path.name).randbytes(path.stat().st_size))


Damage = Callable[[Path], None]
DAMAGES: list[Damage] = [
    *(flip_payload, flip_headers, flip_everywhere, truncate_halves, truncate_oddly, empty_all, swap),
    *(duplicate, swap_payloads, delete, lose_manifests, truncate_manifests, noise),
]


def evidence(served: DaemonThread) -> int:
    """Return how often the daemon has counted damage: at recovery, or when a record was read."""
    counters: dict[str, int] = served.call(served.daemon.planner.statistics)["counters"]
    assert served.daemon.assembly.store is not None
    failures = served.daemon.assembly.store.statistics().failures
    return sum(n for name, n in counters.items() if name.startswith("recovery_")) + sum(failures.values())


def read_all(client: RawClient) -> int:
    """Read every chain; every byte that comes must be right. Return the number of blocks that came."""
    namespace = client.register(heads=HEADS)
    num_found = 0
    for number in range(NUM_CHAINS):
        found = read_in_place(client, namespace, chain(NUM_BLOCKS, f"c{number}"))
        assert payload(number).startswith(found), f"wrong bytes in chain {number}"
        num_found += len(found) // BLOCK_BYTES
    return num_found


def test_without_damage_everything_comes_back_and_nothing_is_counted(golden: Path, tmp_path: Path) -> None:
    shutil.copytree(golden, tmp_path / "nvme")
    with DaemonThread(small_settings(tmp_path, nvme=True)) as served, connected(served) as client:
        assert read_all(client) == NUM_CHAINS * NUM_BLOCKS
        assert evidence(served) == 0


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_between_two_lives_costs_misses_that_are_counted(
    golden: Path, tmp_path: Path, damage: Damage
) -> None:
    shutil.copytree(golden, tmp_path / "nvme")
    damage(tmp_path / "nvme")
    with DaemonThread(small_settings(tmp_path, nvme=True)) as served, connected(served) as client:
        num_found = read_all(client)
        assert read_all(client) == num_found, "the second answer is the first"
        assert num_found < NUM_CHAINS * NUM_BLOCKS
        assert evidence(served) > 0
        print(f"{num_found} of {NUM_CHAINS * NUM_BLOCKS} blocks, damage counted {evidence(served)} times")
        namespace = client.register(heads=HEADS)
        # Everything can be stored again. Damage that nobody has read yet is found behind what is repaired: a
        # round for each block of a chain at worst.
        for _ in range(NUM_BLOCKS):
            for number in range(NUM_CHAINS):
                outcomes = client.put(namespace, chain(NUM_BLOCKS, f"c{number}"), payload(number))
                assert set(outcomes) <= {pb.PUT_OUTCOME_STORED, pb.PUT_OUTCOME_DEDUPLICATED}
            if read_all(client) == NUM_CHAINS * NUM_BLOCKS:
                break
        else:
            pytest.fail("not repaired")
        served.wait(served.daemon.drain(60.0))
    with DaemonThread(small_settings(tmp_path, nvme=True)) as served, connected(served) as client:
        assert read_all(client) == NUM_CHAINS * NUM_BLOCKS, "the damage is gone with the next life"


# --------------------------------------------------------------------------------------- a full disk


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 24 MiB or less."""
    folder, image = tmp_path / "disk", tmp_path / "image"
    folder.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "kvtier-test", str(folder)]
    else:
        with image.open("wb") as file:
            file.truncate(28 * MIB)
        made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, check=False)
        if made.returncode:
            pytest.skip(f"mkfs.ext4 refuses: {made.stderr.decode().strip()}")
        command = ["mount", "-o", "loop", str(image), str(folder)]
    if os.geteuid() != 0 or (mounted := subprocess.run(command, capture_output=True, check=False)).returncode:
        reason = "not root" if os.geteuid() != 0 else mounted.stderr.decode().strip()
        pytest.skip(f"a file system cannot be mounted here: {reason}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def on_disk(folder: Path, disk: Path, capacity: str) -> Daemon:
    sizes = ("tiers.dram.capacity=8MiB", "tiers.dram.extent=2MiB", "tiers.nvme.segment=1MiB")
    places = (f"tiers.nvme.path={disk}/nvme", f"tiers.nvme.capacity={capacity}")
    settings = (*sizes, *places, "compression.codec=identity")
    return Daemon(folder, settings=settings)


def fill(disk: Path) -> None:
    """Take every free byte of a file system."""
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (MIB, 4096, 1):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                continue


def test_a_disk_that_is_too_small_is_refused_at_start_and_left_as_it_was(disk: Path, tmp_path: Path) -> None:
    before = os.statvfs(disk).f_bfree
    refused = on_disk(tmp_path, disk, "64MiB")
    with pytest.raises(AssertionError, match="ended at once"):
        refused.start()
    message = refused.log.read_text()
    assert refused.stop() == process.EXIT_CANNOT_START
    assert f"tiers.nvme.capacity: {disk}/nvme: 64 MiB wanted, " in message
    assert "make room" in message
    assert "Traceback" not in message
    assert list((disk / "nvme").glob("segment-*")) == []
    assert os.statvfs(disk).f_bfree >= before - 64
    fitting = on_disk(tmp_path, disk, "16MiB")
    fitting.start()
    assert fitting.stop() == 0


def test_a_disk_that_fills_up_meanwhile_loses_nothing(disk: Path, tmp_path: Path) -> None:
    """Segments have their space from the start, so that spills go on; what the manifest cannot say is lost at
    worst as a place to spill to, never as bytes that are served."""
    running = on_disk(tmp_path, disk, "16MiB")
    try:
        running.start()
        with RawClient(f"{running.path}.local") as client:
            client.attach()
            namespace = client.register(heads=HEADS)
            client.put(namespace, chain(NUM_BLOCKS, "c0"), payload(0))
            fill(disk)
            for number in range(1, 40):  # 20 MiB: more than dram, and more than nvme: reclaim runs, too
                client.put(namespace, chain(NUM_BLOCKS, f"c{number}"), payload(number))
                assert read_in_place(client, namespace, chain(NUM_BLOCKS, f"c{number}")) == payload(number)
            other = client.register(heads=HEADS, model=b"n" * 16)  # one more line for the manifest
            client.put(other, chain(NUM_BLOCKS, "c0"), payload(0))
            assert read_in_place(client, other, chain(NUM_BLOCKS, "c0")) == payload(0)
            num_found = 0
            for number in range(40):
                found = read_in_place(client, namespace, chain(NUM_BLOCKS, f"c{number}"))
                assert payload(number).startswith(found), f"wrong bytes in chain {number}"
                num_found += len(found) // BLOCK_BYTES
            assert num_found >= 6 * NUM_BLOCKS, "memory at least is served"
            assert running.audit() == []
            print(f"{num_found} blocks found of {40 * NUM_BLOCKS}; {dict(running.status().counters)}")
        assert running.stop() == 0
        (disk / "filler").unlink()
        running.start()
        with RawClient(f"{running.path}.local") as client:
            client.attach()
            namespace = client.register(heads=HEADS)
            num_again = 0
            for number in range(40):
                found = read_in_place(client, namespace, chain(NUM_BLOCKS, f"c{number}"))
                assert payload(number).startswith(found), f"wrong bytes in chain {number}"
                num_again += len(found) // BLOCK_BYTES
            print(f"{num_again} blocks found by the next life")
            assert num_again > 0
            assert running.stop() == 0
    finally:
        running.close()
