"""Early layers: late ones leave first, from tail to head; what is trimmed is read from two tiers."""

from kvtier.appliance.core import events as ev
from kvtier.tiers.block import Tier, Urgency

from .rig import GEOMETRY, Rig, hashes

EARLY = {"early_layers": 0.5, "max_early_fraction": 0.5}


def layers(rig: Rig, chain: list[bytes]) -> list[int]:
    """Return how many layer groups of each block are in dram."""
    catalog = rig.planner.catalog
    rows = [catalog.find(rig.namespace_id, name) for name in chain]
    return [catalog.num_resident[Tier.DRAM][row] if row >= 0 else 0 for row in rows]


def clean(num_blocks: int, **options: object) -> tuple[Rig, list[bytes]]:
    """Return a rig and a chain that is in dram and in nvme."""
    rig = Rig(nvme_blocks=16, **{"dram_blocks": num_blocks, **EARLY, **options})  # type: ignore[arg-type]
    chain = hashes("a", num_blocks)
    rig.put(chain)
    rig.cool(chain)
    call = rig.acquire(chain)
    rig.settle()
    rig.release(call)
    assert layers(rig, chain) == [2] * num_blocks
    rig.now += 1.0
    return rig, chain


def test_late_layers_make_room_and_early_ones_stay() -> None:
    rig, chain = clean(4)
    rig.put(hashes("new", 2))
    assert layers(rig, chain) == [1, 1, 1, 1]
    assert rig.found(chain) == 4
    removed = [n for n in rig.notices if n.change is ev.BlockChange.REMOVED and n.reason == "late layers"]
    assert [name for notice in removed for name in notice.prefix_hashes] == chain[::-1], "tail first"


def test_a_trimmed_block_begins_at_once_and_ends_when_the_rest_is_up() -> None:
    rig, chain = clean(4)
    rig.put(hashes("new", 1))
    call = rig.acquire(chain)
    ready = [(r.block, r.group) for r in rig.answer(call).ready]
    assert ready == [(n, 0) for n in range(3)], "and the fourth as soon as there is room for the others' rest"
    loads = [copy for copy in rig.copies if copy.target is Tier.DRAM]  # beside the spill of what is new
    assert {item.label.group for copy in loads for item in copy.items} == {1}
    rig.settle()
    assert rig.answer(call).num_blocks == 4
    assert rig.answer(call).last


def test_when_trimmed_blocks_fill_their_share_the_first_one_goes() -> None:
    rig, chain = clean(4, max_early_fraction=0.3)
    rig.put(hashes("new", 2))
    assert layers(rig, chain) == [1, 1, 1, 1]
    rig.put(hashes("newer", 1))
    assert layers(rig, chain)[3] == 0, "the tail was trimmed first"
    assert layers(rig, chain)[0] == 1
    assert rig.found(chain) == 4


def test_off_by_default_and_for_blocks_of_one_group() -> None:
    rig, chain = clean(4, early_layers=0.0)
    rig.put(hashes("new", 2))
    assert sorted(layers(rig, chain)) == [0, 0, 2, 2]


def test_what_is_only_in_dram_is_never_trimmed() -> None:
    rig = Rig(dram_blocks=4, nvme_blocks=16, **EARLY)  # type: ignore[arg-type]
    chain = hashes("a", 4)
    rig.put(chain)
    call = rig.start_put(hashes("new", 1))
    assert layers(rig, chain) == [2, 2, 2, 2], "first it is spilled"
    rig.settle()
    assert rig.answer(call).outcomes == bytes([ev.PutOutcome.STORED])
    assert rig.found(chain) == 4


def test_a_decoding_session_keeps_all_layers() -> None:
    rig, chain = clean(4, put_wait_s=0.1)
    rig.acquire(chain[:2], session_id="s", urgency=Urgency.DECODING)
    rig.put(hashes("new", 1))
    assert layers(rig, chain)[:2] == [2, 2]
    assert GEOMETRY.num_groups == 2
