"""What encoded fragments need: counted, believed when there is enough, forgotten when it is old."""

from kvtier.tiers.codecs.needs import MIN_COUNTED, STEPS, Need, Needs

NEED = Need(1, b"n" * 32, 0)
RAW = 12_800


def share(step: int) -> int:
    """Return the length that is counted as `step`."""
    return RAW * step // STEPS


def test_nothing_is_believed_too_early() -> None:
    needs = Needs()
    for _ in range(MIN_COUNTED - 1):
        needs.fitted(NEED, share(90), RAW)
    assert needs.reserves() == {}
    needs.fitted(NEED, share(90), RAW)
    assert needs.reserves() == {NEED: 90 / STEPS}


def test_nearly_all_are_to_fit() -> None:
    needs = Needs()
    for number in range(1000):
        needs.fitted(NEED, share(100 if number % 200 == 0 else 88), RAW)
    assert needs.reserves() == {NEED: 88 / STEPS}  # five in a thousand do without
    for _ in range(20):
        needs.fitted(NEED, share(100), RAW)
    assert needs.reserves() == {NEED: 100 / STEPS}


def test_what_does_not_fit_asks_for_more_until_it_does() -> None:
    needs = Needs()
    given = share(80)
    for _ in range(6):
        for _ in range(MIN_COUNTED * 4):
            if given < share(90):
                needs.unfit(NEED, given, RAW)
            else:
                needs.fitted(NEED, share(90), RAW)
        given = int(needs.reserves()[NEED] * RAW)
    assert needs.reserves()[NEED] * RAW >= share(90)


def test_what_is_old_is_forgotten() -> None:
    needs = Needs()
    for _ in range(4000):
        needs.fitted(NEED, share(100), RAW)
    for _ in range(40_000):
        needs.fitted(NEED, share(80), RAW)
    assert needs.reserves() == {NEED: 80 / STEPS}


def test_everyone_has_a_need_of_their_own() -> None:
    needs = Needs()
    other = NEED._replace(group=1)
    for _ in range(MIN_COUNTED):
        needs.fitted(NEED, share(80), RAW)
        needs.fitted(other, RAW, RAW)
    assert needs.reserves() == {NEED: 80 / STEPS, other: 1.0}
