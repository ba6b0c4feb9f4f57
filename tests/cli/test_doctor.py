"""The doctor's verdicts on hosts that are not this one, and that it looks at this one without a trace."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier import __version__
from kvtier.appliance.cli import doctor
from kvtier.appliance.config import Access, Settings, Tls
from kvtier.appliance.preflight import checks_gpu, checks_host, checks_places, facts, probes, table
from kvtier.appliance.preflight.checks_files import judge_master_keys
from kvtier.appliance.preflight.checks_settings import check_tcp_address
from kvtier.appliance.preflight.verdicts import CheckVerdict
from kvtier.tiers.encryption.keyring import Keyring
from kvtier.tiers.encryption.master_keys import MasterKeys, key_id
from kvtier.tiers.gpu.device.libraries import CudaLibraries
from kvtier.tiers.gpu.device.topology import GpuPlace

from .conftest import GIB, ScriptedAdmin, run

HOST = facts.Host(
    kernel="6.8.0",
    machine="x86_64",
    has_pidfd=True,
    seal_error="",
    available_bytes=64 * GIB,
    num_huge_pages=4096,
    num_free_huge_pages=4096,
    memlock_bytes=None,
    can_lock_anything=False,
    max_descriptors=1 << 20,
    nodes=(probes.Node(0, True, 32 * GIB),),
    shm_bytes=64 << 20,
    clock_source="tsc",
)
POOR = replace(HOST, num_huge_pages=0, num_free_huge_pages=0)
VERSIONS = facts.Versions(__version__, "3.11.7", "1.85.1", "7.36.2")
DIRECTORY = facts.Directory(
    path=Path("/data"),
    exists=True,
    is_something_else=False,
    is_writable=True,
    filesystem="ext4",
    free_bytes=100 * GIB,
    own_bytes=0,
    write_errno=0,
    lock_holder="",
)
CUDA = ("tiers.hbm.capacity=1GiB", "tiers.hbm.backend=cuda")
LIBRARIES = CudaLibraries("13.0", "", "cupy-cuda13x 14.2.0", "/lib/libnvrtc.so.13", "/include")
GPU = facts.Gpu("580.1", ("NVIDIA H200",), LIBRARIES)
FAR = replace(GPU, places=(GpuPlace("0000:ca:00.0", 1, 32.0, 16, 16),))
NARROW = replace(GPU, places=(GpuPlace("0000:ca:00.0", 1, 32.0, 8, 16),))
TLS = Tls(certificate=Path("/c.pem"), key=Path("/k.pem"), client_ca=Path("/ca.pem"))
ADDRESS = "unix:///run/k/k.sock"
LISTEN = facts.Listen(ADDRESS, Path("/run/k/k.sock"), Path("/run/k"))
DAEMON = facts.RunningDaemon(ADDRESS, reachable=True, version=__version__, backends={"nvme": "direct"})
NOBODY = facts.RunningDaemon(ADDRESS, error="no daemon at unix:///run/k/k.sock")


def settings(*overrides: str) -> Settings:
    """Return settings of 1 GiB of dram, whatever this machine has."""
    return Settings.load(env={}, overrides=["tiers.dram.capacity=1GiB", *overrides])


def nvme(*overrides: str) -> Settings:
    return settings("tiers.nvme.path=/data", "tiers.nvme.capacity=10GiB", *overrides)


def held_by_daemon() -> int:
    """Return what a daemon with 1 GiB of dram holds."""
    running = facts.Facts(settings(), replace(DAEMON, memory_bytes=GIB))
    return checks_host.held_memory_bytes(running, settings())


KEYS = facts.MasterKeyFile(Path("/etc/m.key"), "", False, ("aaaa", "bbbb"), {"aaaa": 2})


def test_a_good_host_is_all_ok() -> None:
    known = {"versions": VERSIONS, "host": HOST, "gpu": facts.Gpu(), "listens": (LISTEN,)}
    known |= {"directory": DIRECTORY, "missing_modules": frozenset(), "native_absence": ""}
    everything = facts.Facts(nvme(), DAEMON, **known)
    assert {check.verdict for check in table.examine(everything, nvme())} == {CheckVerdict.OK}


OK, WARN, FAIL = CheckVerdict.OK, CheckVerdict.WARN, CheckVerdict.FAIL
ON, LOCK = "tiers.dram.hugepages=on", "tiers.dram.lock=true"

KEY_CASES = {
    "one key": (replace(KEYS, ids=("aaaa",)), OK, "aaaa in force, wraps 2"),
    "old key not needed": (KEYS, WARN, "not needed by this store any more: bbbb"),
    "old key needed": (replace(KEYS, wraps={"aaaa": 1, "bbbb": 2}), WARN, "bbbb wraps 2"),
    "an older version's": (
        replace(KEYS, ids=("aaaa",), wraps={"": 2}),
        WARN,
        "2 wrapped by an older version",
    ),
    "old key missing": (
        replace(KEYS, wraps={"cccc": 3, "aaaa": 1}),
        FAIL,
        "cccc wraps 3 tenants' keys and is not in /etc/m.key",
    ),
    "another user's": (replace(KEYS, is_unreadable=True, ids=()), WARN, "cannot be read by this user"),
    "unusable": (replace(KEYS, error="/etc/m.key has mode 0644; `chmod 600`", ids=()), FAIL, "has mode 0644"),
}


@pytest.mark.parametrize("case", KEY_CASES)
def test_what_the_master_keys_come_to(case: str) -> None:
    file, verdict, words = KEY_CASES[case]
    check = judge_master_keys(file)
    assert check.verdict is verdict
    assert words in check.detail
    assert bool(check.fix) is (verdict is not OK)


def test_the_master_keys_of_a_store_are_looked_at(tmp_path: Path) -> None:
    """Made by a keyring, read by the doctor, who needs no key for it. As the owner of the store would."""
    old, new = bytes(range(32)), bytes(range(32, 64))
    Keyring(tmp_path, MasterKeys(old)).key_for_writing("tenant:red")
    path = tmp_path / "master.key"
    path.touch(0o600)
    path.write_text(f"{new.hex()}\n{old.hex()}\n")
    chosen = nvme(f"tiers.nvme.path={tmp_path}", f"encryption.master_key={path}")
    found = facts.gather_master_keys(chosen)
    assert found == facts.MasterKeyFile(path, "", False, (key_id(new), key_id(old)), {key_id(old): 1})
    path.chmod(0o644)
    found = facts.gather_master_keys(chosen)
    assert found is not None
    assert "chmod 600" in judge_master_keys(found).fix
    assert facts.gather_master_keys(settings()) is None


HOST_CASES = {
    "no pidfd": (checks_host.check_kernel(replace(HOST, has_pidfd=False)), FAIL, "Linux 5.4"),
    "no seals": (checks_host.check_shared_memory(replace(HOST, seal_error="refused")), FAIL, "seccomp"),
    "native": (checks_host.check_native("KVTIER_NATIVE=off"), WARN, "unset KVTIER_NATIVE"),
    "little memory": (
        checks_host.check_memory(replace(POOR, available_bytes=GIB), settings()),
        FAIL,
        "lower tiers.dram.capacity",
    ),
    "tight memory": (
        checks_host.check_memory(replace(POOR, available_bytes=1100 << 20), settings()),
        WARN,
        "to leave room",
    ),
    "huge pages come on top": (
        checks_host.check_memory(
            replace(HOST, available_bytes=GIB, num_free_huge_pages=512),
            settings("tiers.dram.capacity=1.5GiB"),
        ),
        OK,
        "",
    ),
    "huge pages that are not taken": (
        checks_host.check_memory(
            replace(HOST, available_bytes=GIB, num_free_huge_pages=512),
            settings("tiers.dram.capacity=1.5GiB", "tiers.dram.hugepages=off"),
        ),
        FAIL,
        "lower tiers.dram.capacity",
    ),
    "memory taken by the daemon": (
        checks_host.check_memory(replace(HOST, available_bytes=0), settings(), held_by_daemon()),
        OK,
        "",
    ),
    "memory left by the daemon before": (
        checks_host.check_memory(
            replace(HOST, available_bytes=0),
            settings(),
            checks_host.held_memory_bytes(
                facts.Facts(settings(), inherited_bytes=checks_host.wanted_memory_bytes(settings())),
                settings(),
            ),
        ),
        OK,
        "",
    ),
    "more than is there beside the daemon": (
        checks_host.check_memory(
            replace(POOR, available_bytes=GIB), settings("tiers.dram.capacity=1TiB"), held_by_daemon()
        ),
        FAIL,
        "lower tiers.dram.capacity",
    ),
    "no huge pages, auto": (
        checks_host.check_huge_pages(replace(HOST, num_free_huge_pages=0, num_huge_pages=8), settings()),
        WARN,
        "sysctl -w vm.nr_hugepages=536",  # 8 taken by others, 528 of ours
    ),
    "no huge pages, on": (
        checks_host.check_huge_pages(replace(HOST, num_free_huge_pages=527), settings(ON)),
        FAIL,
        "set tiers.dram.hugepages to auto",
    ),
    "just enough huge pages": (
        checks_host.check_huge_pages(replace(HOST, num_free_huge_pages=528), settings(ON)),
        OK,
        "",
    ),
    "no huge pages, off": (
        checks_host.check_huge_pages(
            replace(HOST, num_free_huge_pages=0), settings("tiers.dram.hugepages=off")
        ),
        OK,
        "",
    ),
    "memlock too low": (
        checks_host.check_memlock(replace(HOST, memlock_bytes=8 << 20), settings(LOCK)),
        FAIL,
        "LimitMEMLOCK=infinity",
    ),
    "memlock not needed": (checks_host.check_memlock(replace(HOST, memlock_bytes=0), settings()), OK, ""),
    "memlock by capability": (
        checks_host.check_memlock(replace(HOST, memlock_bytes=0, can_lock_anything=True), settings(LOCK)),
        OK,
        "",
    ),
    "descriptors": (
        checks_host.check_descriptors(replace(HOST, max_descriptors=100), settings()),
        FAIL,
        "LimitNOFILE=1168",
    ),
    "descriptors of many clients": (
        checks_host.check_descriptors(replace(HOST, max_descriptors=1024), settings()),
        WARN,
        "LimitNOFILE=1168",
    ),
    "no such node": (
        checks_host.check_numa(HOST, settings("tiers.dram.numa_nodes=[0, 3]")),
        FAIL,
        "write nodes that exist",
    ),
    "two nodes": (
        checks_host.check_numa(replace(HOST, nodes=(*HOST.nodes, probes.Node(1, False, GIB))), settings()),
        WARN,
        "numa_nodes",
    ),
    "slow clock": (checks_host.check_clock(replace(HOST, clock_source="hpet")), WARN, "clocksource=tsc"),
    "small /dev/shm": (checks_host.check_dev_shm(replace(HOST, shm_bytes=0)), OK, ""),
    "far from the gpu": (
        checks_gpu.check_topology(FAR, settings(*CUDA)),
        WARN,
        "tiers.dram.numa_nodes: [1]",
    ),
    "near the gpu": (checks_gpu.check_topology(FAR, settings(*CUDA, "tiers.dram.numa_nodes=[1]")), OK, ""),
    "half the lanes": (checks_gpu.check_topology(NARROW, settings(*CUDA)), WARN, "reseat"),
    "no gpu on the bus": (checks_gpu.check_topology(facts.Gpu(), settings(*CUDA)), OK, ""),
    "no gds": (checks_gpu.check_gds(facts.Gpu(), DIRECTORY, nvme(*CUDA)), OK, ""),
    "no gpu": (checks_gpu.check_gpu(facts.Gpu(), settings()), OK, ""),
    "no driver": (checks_gpu.check_gpu(facts.Gpu(), settings(*CUDA)), FAIL, "NVIDIA runtime"),
    "no libcuda": (
        checks_gpu.check_gpu(
            replace(GPU, libraries=CudaLibraries(problem="libcuda.so.1 is missing")), settings(*CUDA)
        ),
        FAIL,
        "driver",
    ),
    "kernels": (checks_gpu.check_kernels(GPU, settings(*CUDA)), OK, ""),
    "kernels that nobody needs": (checks_gpu.check_kernels(facts.Gpu(), settings()), OK, ""),
    "no cupy": (
        checks_gpu.check_kernels(replace(GPU, libraries=CudaLibraries("12.8")), settings(*CUDA)),
        WARN,
        "kvtier[gpu-cuda12]",
    ),
    "no NVRTC and no headers": (
        checks_gpu.check_kernels(
            replace(GPU, libraries=replace(LIBRARIES, nvrtc="", headers="")), settings(*CUDA)
        ),
        WARN,
        "kvtier[gpu-cuda13]",
    ),
    "no such gpu": (
        checks_gpu.check_gpu(replace(GPU, names=()), settings(*CUDA)),
        FAIL,
        "tiers.hbm.device",
    ),
    "gpu": (checks_gpu.check_gpu(GPU, settings(*CUDA)), OK, ""),
    "pinned": (checks_gpu.check_pinning(GPU, settings(*CUDA)), OK, ""),
    "pinned up to a limit": (
        checks_gpu.check_pinning(replace(GPU, pin_limits=("memlock limit 64 MiB",)), settings(*CUDA)),
        WARN,
        "tiers.dram.capacity",
    ),
    "open port": (check_tcp_address("0.0.0.0:1", Access(insecure=True)), WARN, "firewall"),
    "loopback": (check_tcp_address("[::1]:1", Access(insecure=True)), OK, ""),
    "open port with certificates": (check_tcp_address("0.0.0.0:1", Access(tls=TLS)), OK, ""),
    "open port with tokens": (
        check_tcp_address("0.0.0.0:1", Access(tls=TLS.model_copy(update={"client_ca": None}))),
        OK,
        "",
    ),
    "another daemon's": (
        checks_places.check_listen(replace(LISTEN, kind="live"), NOBODY),
        FAIL,
        "kvtier drain --exit --target unix:///run/k/k.sock",
    ),
    "the daemon's, seen by another user": (
        checks_places.check_listen(replace(LISTEN, kind="live", is_writable=False), DAEMON),
        OK,
        "",
    ),
    "another user's": (checks_places.check_listen(replace(LISTEN, kind="closed"), NOBODY), FAIL, "listen"),
    "file in the way": (
        checks_places.check_listen(replace(LISTEN, kind="other"), NOBODY),
        FAIL,
        "remove /run/k/k.sock",
    ),
    "folder not ours": (
        checks_places.check_listen(replace(LISTEN, is_writable=False), NOBODY),
        FAIL,
        "install -d",
    ),
    "folder of all": (
        checks_places.check_listen(replace(LISTEN, is_shared_folder=True), NOBODY),
        WARN,
        "chmod 0700",
    ),
    "dead socket": (checks_places.check_listen(replace(LISTEN, kind="socket"), NOBODY), OK, ""),
}


@pytest.mark.parametrize("name", HOST_CASES)
def test_verdicts_on_the_host(name: str) -> None:
    check, verdict, words = HOST_CASES[name]
    assert check.verdict is verdict
    assert words in check.fix
    assert bool(check.fix) == (verdict is not OK)  # whatever is not well has a fix


DIRECTORY_CASES = {
    "a file": (replace(DIRECTORY, is_something_else=True), "nvme /data", FAIL, "to a directory"),
    "not writable": (replace(DIRECTORY, is_writable=False), "nvme /data", FAIL, "chown"),
    "memory": (replace(DIRECTORY, filesystem="tmpfs"), "nvme /data", WARN, "NVMe disk"),
    "network": (replace(DIRECTORY, filesystem="fuse.sshfs"), "nvme /data", WARN, "local disk"),
    "container layer": (replace(DIRECTORY, filesystem="overlay"), "nvme /data", WARN, "mount a volume"),
    "no direct I/O": (
        replace(DIRECTORY, write_errno=errno.EOPNOTSUPP),
        "nvme direct I/O",
        WARN,
        "ext4 or xfs",
    ),
    "read-only": (replace(DIRECTORY, write_errno=errno.EROFS), "nvme /data", FAIL, "mount it for writing"),
    "full": (replace(DIRECTORY, write_errno=errno.ENOSPC), "nvme /data", FAIL, "make room"),
    "broken": (replace(DIRECTORY, write_errno=errno.EIO), "nvme /data", FAIL, "dmesg"),
    "no space": (replace(DIRECTORY, free_bytes=9 * GIB), "nvme space", FAIL, "lower tiers.nvme.capacity"),
    "owned": (replace(DIRECTORY, lock_holder="pid 7"), "nvme lock", FAIL, "stop that process"),
}


@pytest.mark.parametrize("name", DIRECTORY_CASES)
def test_verdicts_on_the_directory(name: str) -> None:
    directory, line, verdict, words = DIRECTORY_CASES[name]
    (check,) = [c for c in checks_places.check_directory(directory, nvme(), False) if c.verdict is not OK]
    assert (check.name, check.verdict) == (line, verdict)
    assert words in check.fix


def test_space_that_the_store_already_has_is_not_wanted_twice() -> None:
    directory = replace(DIRECTORY, free_bytes=GIB, own_bytes=9 * GIB, lock_holder="pid 7")
    assert {check.verdict for check in checks_places.check_directory(directory, nvme(), True)} == {OK}


def test_verdicts_on_the_daemon() -> None:
    def worst(daemon: facts.RunningDaemon) -> tuple[str, CheckVerdict]:
        (bad,) = [check for check in checks_places.check_daemon(daemon, VERSIONS) if check.verdict is not OK]
        assert bad.fix
        return bad.name, bad.verdict

    assert worst(NOBODY) == ("daemon", WARN)
    assert worst(replace(NOBODY, was_named=True)) == ("daemon", FAIL)
    assert worst(replace(NOBODY, is_silent=True)) == ("daemon", FAIL)
    assert worst(replace(DAEMON, policy_problem="these need a restart: listen")) == ("daemon policy", WARN)
    assert worst(replace(DAEMON, offline=("nvme",))) == ("daemon nvme", FAIL)
    assert worst(replace(DAEMON, source_problem="no answer")) == ("daemon object store", WARN)
    assert worst(replace(DAEMON, version="9.9.9")) == ("daemon version", WARN)
    assert worst(replace(DAEMON, draining=True)) == ("daemon state", WARN)
    assert worst(replace(DAEMON, problems=("slot 1 is free and taken",))) == ("daemon integrity", FAIL)
    assert worst(replace(DAEMON, backends={"nvme": "aiofiles"})) == ("daemon nvme", WARN)


def test_the_command_on_this_host_with_and_without_a_daemon(
    scripted: ScriptedAdmin, target: str, tmp_path: Path
) -> None:
    arguments = ["doctor", "--json", "--set", f"tiers.nvme.path={tmp_path / 'new' / 'data'}"]
    arguments += ["--set", "tiers.nvme.capacity=192MiB", "--set", f"listen={target}"]
    before = sorted(os.listdir(tmp_path))
    result = run(*arguments, target=target)
    report = json.loads(result.stdout)
    assert list(report) == ["num_ok", "num_warn", "num_fail", "checks"]
    assert all(list(check) == ["name", "verdict", "detail", "fix", "setting"] for check in report["checks"])
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    for name in ("kernel", "shared memory", "daemon", "daemon integrity", "daemon nvme", "nvme lock"):
        assert verdicts[name] == "ok"
    assert result.exit_code == (1 if report["num_fail"] else 0)
    assert sorted(os.listdir(tmp_path)) == before  # it left nothing behind

    scripted.status.tiers[1].is_offline = True
    assert "tier nvme stopped working" in run(*arguments, target=target).stdout
    assert "nvme OFFLINE" in run("status", target=target).stdout
    scripted.status.tiers[1].is_offline = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "TIMEOUT_S", 0.2)
        scripted.delay_s = 1.0
        checks = json.loads(run(*arguments, target=target).stdout)["checks"]
    scripted.delay_s = 0.0
    assert [check["name"] for check in checks if check["verdict"] == "fail"] == ["daemon"], (
        "what it has is its own"
    )

    scripted.problems = ["slot 1 is free and taken"]
    sick = run(*arguments, target=target)
    assert sick.exit_code == 1
    assert "slot 1 is free and taken" in sick.stdout
    absent = run("doctor", target=f"unix://{tmp_path}/absent.sock")
    assert absent.exit_code == 1  # it was named, so its absence is a failure
    assert "fail daemon" in absent.stdout
    assert "fix: start it with `kvtier serve`" in absent.stdout
