"""What is done in the first ten minutes on a GPU, in this order, and what stands for it in a rehearsal.

What says most comes first, and what may leave the device in a bad state comes late. A file of tests is a
process, since one CUDA error that stays fails all tests after it. Rehearsed is everything that has a
stand-in: the fake device, and kernels compiled for the host.
"""

import sys

from .first_contact import Step

EARLY_S, LATE_S = 45.0, 60.0
DRY_S = 240.0  # of a rehearsed step: a busy machine without a GPU takes its time

_PYTHON = (sys.executable, "-W", "default", "-m")
_PYTEST = (*_PYTHON, "pytest", "-q", "-rfEs", "-W", "default", "--timeout=45", "-p", "no:cacheprovider")
_ONCE = (
    "test_pieces_by_the_kernel[333]",
    "test_exponents_decode_to_the_hosts_bits[shape0]",
    "test_the_digest_is_the_hosts[1024]",
    "test_quantised_records_decode_to_the_hosts_bits[int-4-bfloat16]",
)
_KERNELS = "tests/gpu/test_kernels.py"
_ON_HOST = "tests/tiers/gpu/test_gpu_tests.py"  # the tests of tests/gpu, on the fake device
_DEVICES = "tests/contracts/test_devices.py"


def steps_of(kind: str) -> list[Step]:
    """Return the steps on `kind`, "cuda" or "fake"."""
    is_fake = kind == "fake"

    def tests(
        name: str, limit_s: float, *arguments: str, dry: tuple[str, ...] = (), hardware: str = ""
    ) -> Step:
        chosen = dry if is_fake and dry else ("-m", "gpu", *arguments)
        return step(
            name, (*_PYTEST, "--junitxml={results}/" + f"{name}.xml", *chosen), limit_s, hardware=hardware
        )

    def step(
        name: str, command: tuple[str, ...], limit_s: float, needs: str = "", hardware: str = ""
    ) -> Step:
        return Step(name, command, DRY_S if is_fake else limit_s, needs, hardware if is_fake else "")

    def probe(name: str, limit_s: float, module: str = "probes") -> Step:
        return step(name, (*_PYTHON, f"tests.gpu.{module}", name, kind, _table(name)), limit_s)

    def bench(name: str, module: str, *arguments: str) -> Step:
        command = (*_PYTHON, f"bench.{module}", "--device", kind, *arguments, "--json", _table(name))
        return step(name, command, LATE_S)

    in_process, across = "not another_process", "another_process"
    small = ("--small", "--layers-per-group", "2") if is_fake else ("--layers-per-group", "16")
    is_quantised = "quantised"
    on_device = () if is_fake else ("--set", "tiers.hbm.capacity=1GiB", "--set", "tiers.hbm.backend=cuda")
    watched = (*_PYTEST, _ON_HOST) if is_fake else (*_PYTEST, "-m", "gpu", _KERNELS)
    sanitizer = (*_PYTHON, "tests.gpu.sanitizer", kind, _table("sanitizer"), *watched)
    return [
        step("nvidia-smi", ("nvidia-smi", "-q", "-d", "MEMORY,CLOCK,POWER,PERFORMANCE"), 20, "nvidia-smi"),
        step("topology", ("nvidia-smi", "topo", "-m"), 20, "nvidia-smi"),
        Step(
            "doctor", (*_PYTHON, "kvtier.appliance.cli", "doctor", "--json", *on_device), 20, accepts=(0, 1)
        ),
        probe("attributes", EARLY_S),
        tests(
            "kernels-once",
            EARLY_S,
            *(f"{_KERNELS}::{test}" for test in _ONCE),
            dry=(_ON_HOST, "-k", "pieces or digest"),
        ),
        tests(
            "contracts",
            EARLY_S,
            _DEVICES,
            "-k",
            in_process,
            dry=(_DEVICES, "-k", f"fake and {in_process} and not cuda"),
        ),
        tests(
            "across", EARLY_S, _DEVICES, "-k", across, dry=(_DEVICES, "-k", f"{across} and fake and not live")
        ),
        probe("shared", EARLY_S, "two_processes"),
        tests(
            "hbm", EARLY_S, "tests/gpu/test_hbm.py", dry=("tests/tiers/gpu/test_copier.py", "-m", "not slow")
        ),
        tests(
            "kernels",
            EARLY_S,
            _KERNELS,
            "-k",
            f"not {is_quantised}",
            dry=(_ON_HOST, "-k", "codec or digest or pieces"),
        ),
        tests("quantised", EARLY_S, _KERNELS, "-k", is_quantised, dry=(_ON_HOST, "-k", "quantisers")),
        probe("batches", EARLY_S),
        probe("killed", EARLY_S, "two_processes"),
        bench("pages-warm", "pages", "--cases", "warm", *small),
        bench("pages-straight", "pages", "--cases", "by dram,straight", *small[: 1 if is_fake else 0]),
        probe("sweep", LATE_S),
        bench("device", "device", "--total", "128" if is_fake else "1024"),
        tests("cold-tests", LATE_S, "tests/gpu/test_cold_edge.py", dry=(_ON_HOST, "-k", "nvme")),
        bench("cold", "cold_edge", "--total", "16" if is_fake else "512"),
        step(
            "sanitizer",
            (*sanitizer, "-k", "pieces or digest"),
            LATE_S,
            "compute-sanitizer",
        ),
    ]


def _table(name: str) -> str:
    return "{results}/" + f"{name}.json"
