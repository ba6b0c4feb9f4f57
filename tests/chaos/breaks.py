"""Defects that are planted into a copy of the product, to see whether chaos sees them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("appliance", "clients", "native", "policies", "sources", "tiers", "proto", "src")


@dataclass(frozen=True, slots=True)
class Break:
    """One text of the product that becomes another."""

    name: str
    file: str
    old: str
    new: str


BREAKS = [
    Break(
        "records-unverified",
        "tiers/cold/record_io.py",
        "if xxhash.xxh3_128_digest(into) != checksum:",
        "if False:",
    ),
    Break(
        "published-before-copied",
        "tiers/payload.py",
        """        np.copyto(target[start:end], origin[start:end])
        digests += [digest(into[first""",
        """        late = target[start:end], origin[start:end].copy()
        __import__("threading").Timer(0.003, np.copyto, late).start()
        digests += [digest(source[first""",
    ),
    Break(
        "slots-stay-readable",
        "tiers/memory/engine.py",
        """        extent.headers.empty(slot)
        if index is not None:
            index.remove(tag, place_of(self.first_extent + number, slot))
""",
        "",
    ),
    Break(
        "leases-outlive-clients",
        "appliance/core/requests/leases.py",
        "for lease_id in list(client.leases):",
        "for lease_id in list(client.leases)[1:]:",
    ),
    Break(
        "overdue-leases-are-forced",
        "appliance/core/requests/leases.py",
        "            if lease.client.local:\n                lease.is_overdue",
        "            if False:\n                lease.is_overdue",
    ),
    Break(
        "memory-forgotten",
        "appliance/persisted/namespace_book.py",
        "        if self.identities.get(number) != identity:\n",
        "        if not number:\n",
    ),
    Break(
        "tenants-share-a-domain",
        "appliance/config/tenants.py",
        'own = {"tenant": f"tenant:{name}"',
        'own = {"tenant": "tenant:"',
    ),
    Break(
        "names-unchecked",
        "clients/memory/extents.py",
        "        right &= (headers[:, HASH:CHECKED_WORDS] == wanted.names).all(axis=1)\n",
        "",
    ),
]
#: Seen by fleet.py: they need another host.
FLEET_BREAKS = [
    Break(
        "hosts-are-believed",
        "appliance/fleet/peer_edge.py",
        "if digest != told or (item and",
        "if item:\n                    memory.view(item.target, 1)[0] ^= 1\n                if (item and",
    ),
    Break(
        "lost-hosts-stay-lost",
        "appliance/fleet/hosts.py",
        "RETRY_S, MAX_RETRY_S = 0.5, 10.0",
        "RETRY_S, MAX_RETRY_S = 1000.0, 1000.0",
    ),
]


def plant(chosen: Break, folder: Path) -> Path:
    """Copy the product into `folder`, with a defect; return what PYTHONPATH is to name."""
    for one in FOLDERS:
        shutil.copytree(ROOT / one, folder / one, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / chosen.file).read_text()
    assert text.count(chosen.old) == 1, f"the defect {chosen.name} is stale: {chosen.file} has changed"
    (folder / chosen.file).write_text(text.replace(chosen.old, chosen.new))
    return folder / "src"


@contextmanager
def planted(name: str | None, folder: Path) -> Iterator[None]:
    """Let processes that are started meanwhile run a copy of the product with a defect; None: the product."""
    if name is None:
        yield
        return
    [chosen] = [one for one in BREAKS + FLEET_BREAKS if one.name == name]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(plant(chosen, folder / "broken"))
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
