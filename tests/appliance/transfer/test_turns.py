"""Copies on the event loop: short ones at once, long ones in turns where processors are few."""

import asyncio
from collections.abc import Sequence

import pytest

from kvtier.appliance.core.instructions import Copy
from kvtier.appliance.transfer.lanes import Route
from kvtier.appliance.transfer.mover import PIECE_BYTES, TURN_S
from kvtier.tiers.base import Cause, CopyItem, CopyOutcome
from kvtier.tiers.block import Tier, Urgency

from ..loops import run, turns
from .movers import STAGING_EDGE, Bench, HandCopier, copy


def slow_bench(item_s: float, *, takes_turns: bool = True) -> tuple[Bench, HandCopier]:
    """Return a mover whose client 7 puts into memory that takes so long for each item on the loop."""
    bench = Bench(takes_turns=takes_turns)
    copier = bench.copiers[STAGING_EDGE]

    def slowly(items: Sequence[CopyItem]) -> list[CopyOutcome]:
        bench.now += item_s * len(items)
        return copier.inline(items)

    bench.mover.attach(7, {Tier.DRAM: Route(copier, slowly)})
    return bench, copier


def test_short_copies_end_at_once_and_long_ones_do_not() -> None:
    async def main() -> None:
        bench = Bench()
        copier = bench.copiers[STAGING_EDGE]
        bench.mover.attach(7, {Tier.DRAM: Route(copier, copier.inline)})
        bench.mover.start(copy(1, STAGING_EDGE, 16, num_bytes=256 << 10, client=7))
        assert bench.finished() == {1: [None] * 16}, "4 MiB are short"
        bench.mover.start(copy(2, STAGING_EDGE, 17, num_bytes=256 << 10, client=7))
        assert 2 not in bench.finished()
        bench.check()
        while copier.running:
            copier.end()
        await turns()
        assert bench.finished()[2] == [None] * 17

    run(main())


def test_where_processors_are_few_long_puts_take_turns_with_others_on_the_loop() -> None:
    async def main() -> None:
        bench = Bench(takes_turns=True)
        copier = bench.copiers[STAGING_EDGE]
        bench.mover.attach(7, {Tier.DRAM: Route(copier, copier.inline)})
        bench.mover.start(copy(1, STAGING_EDGE, 16, num_bytes=1 << 20, client=7))
        assert bench.finished() == {1: [None] * 16}, "16 MiB are short here"
        bench.mover.start(copy(2, STAGING_EDGE, 40, num_bytes=1 << 20, client=7))
        num_copied: list[int] = []
        for _ in range(4):
            num_copied.append(len(copier.started))
            bench.check()
            await asyncio.sleep(0)
        assert num_copied == [16, 32, 48, 56], "one batch of 16 MiB a turn, after the one before"
        assert bench.finished()[2] == [None] * 40
        assert not copier.running, "no thread had a part in it"
        short, long = copy(3, STAGING_EDGE, 2, num_bytes=33 << 20, client=7).items
        short.label.raw_length = 64 << 10
        bench.mover.start(Copy(3, None, Tier.DRAM, [short, long], Urgency.PREFILL, float("inf"), 7))
        assert [len(items) for items, _ in copier.running] == [2], "one is too long for the loop"
        copier.end()
        await turns()
        bench.check()

    run(main())


def test_a_turn_ends_in_the_middle_of_a_batch_where_memory_is_slow() -> None:
    """Both that of a copy that runs at once, and those of what is left of it."""

    async def main() -> None:
        bench, copier = slow_bench(TURN_S / 2)
        bench.mover.start(copy(1, STAGING_EDGE, 16, num_bytes=PIECE_BYTES, client=7))
        bench.mover.start(copy(2, STAGING_EDGE, 1, num_bytes=PIECE_BYTES, client=7, urgency=Urgency.DECODING))
        num_copied: list[int] = []
        for _ in range(9):
            num_copied.append(len(copier.started))
            bench.check()
            await asyncio.sleep(0)
        assert num_copied == [3, 5, 7, 9, 11, 13, 15, 17, 17], "the short one at once, others two a turn"
        outcomes = {e.copy: [one.checksum for one in e.outcomes] for e in bench.ended()}
        assert outcomes[1] == [n.to_bytes(16, "big") for n in range(16)], "each where it belongs"
        assert next(iter(outcomes)) == 2, "the short one waited for none of it"

    run(main())


def test_what_is_left_of_a_turn_goes_to_threads_where_there_are_processors() -> None:
    async def main() -> None:
        bench, copier = slow_bench(TURN_S, takes_turns=False)
        bench.mover.start(copy(1, STAGING_EDGE, 4, num_bytes=PIECE_BYTES, client=7))
        assert sum(len(items) for items, _ in copier.running) == 3
        while copier.running:
            copier.end()
            await turns()
        assert bench.finished() == {1: [None] * 4}
        bench.check()

    run(main())


@pytest.mark.parametrize(
    ("what", "cause"),
    [("detach", Cause.SOURCE_GONE), ("refuse", Cause.TIER_OFFLINE), ("stop", Cause.CANCELLED)],
)
def test_what_ends_between_two_turns_ends_the_rest_of_a_copy(what: str, cause: Cause) -> None:
    async def main() -> None:
        bench, _ = slow_bench(TURN_S)
        bench.mover.start(copy(1, STAGING_EDGE, 4, num_bytes=PIECE_BYTES, client=7))
        if what == "detach":
            bench.mover.detach(7)
        elif what == "refuse":
            bench.mover.refuse(Tier.DRAM)
        else:
            await bench.mover.stop()
        await turns()
        assert bench.finished() == {1: [None, None, cause, cause]}, "the second one had begun"
        bench.check()

    run(main())


def test_an_engine_that_raises_in_its_turn_fails_that_copy_only() -> None:
    async def main() -> None:
        bench = Bench(takes_turns=True)

        def broken(items: Sequence[CopyItem]) -> list[CopyOutcome]:
            raise RuntimeError("a defect")

        bench.mover.attach(7, {Tier.DRAM: Route(bench.copiers[STAGING_EDGE], broken)})
        bench.mover.start(copy(1, STAGING_EDGE, 17, num_bytes=1 << 20, client=7))
        await turns()
        assert bench.finished() == {1: [Cause.IO_ERROR] * 17}
        bench.check()

    run(main())
