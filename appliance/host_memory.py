"""Whether this host has the memory that the policy asks for, asked before any of it is taken.

Memory of a memfd is made page by page, and when there is none left the kernel ends some process, not
necessarily this one. So a daemon that cannot have its memory says so and does not start. Huge pages were set
aside for it by somebody and are not part of what the kernel calls available.
"""

from ..v1.shm import HUGE_PAGE_BYTES
from .cli.checks import wanted_memory_bytes
from .cli.probes import HUGE_PAGES, available_bytes, read_number
from .errors import StartError
from .settings import Settings
from .units import about_bytes


def require_memory(settings: Settings) -> None:
    """Raise StartError when the memory tiers would take more than there is, a container's limit included."""
    wanted, there = wanted_memory_bytes(settings), available_bytes()
    if settings.tiers.dram.hugepages != "off":
        there += read_number(HUGE_PAGES / "free_hugepages") * HUGE_PAGE_BYTES
    if wanted > there:
        raise StartError(
            f"the memory tiers would take {about_bytes(wanted)}, {about_bytes(there)} are available; lower "
            "tiers.dram.capacity (or tiers.hbm.capacity), or raise the container's memory limit"
        )
