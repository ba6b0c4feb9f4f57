"""Learns hazards from the uses of stretches, and prices stretches by them.

Its time is told with every call. A use is an observation for the stretch the blocks were in, and so is each
age bin that a stretch outlives unused: `advance` walks an agenda of these, a bounded number per call. A
stretch has NUM_PRICES prices ready, for the steps of age that come next. They are out of date when it moves
to another bin, invalid when something about its visit changes, and made anew when they are read: most
stretches move many times before that, and while a tier has room no price is read at all.

Which blocks are in which stretch is decided by forecast.py.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .ages import (
    EDGES_S,
    F64,
    MIN_GAP_S,
    NUM_BINS,
    NUM_STEPS,
    STEP_EDGES_S,
    STEPS_PER_BIN,
    bin_of,
    step_of,
    steps_of,
)
from .hazard import Hazards, Observations, parts_of
from .rates import UseRates
from .stretches import DESCRIPTION, I32, NUM_PRICES, OUTDATED, PRICED, UNPRICED, Stretches
from .visits import (
    GAPS_ON_LINE,
    LINES,
    NUM_FEATURES,
    NUM_GAPS,
    NUM_KINDS,
    PRIVATE,
    PUBLIC,
    SIZES,
    Past,
    Visit,
    features_of,
    gap_bins_of,
)
from .worth import index_at

#: Observations that are learned together before a price is made, and as soon as there are so many: most of
#: learning costs the same however many they are, and while a tier has room no price is made at all.
BATCH, FULL_BATCH = 128, 512
#: Stretches that move to their next age bin per call; each is one observation.
MAX_MOVES = 256
#: Stretches that are priced together, where many are out of date.
MAX_REPRICED = 128
#: Fewer stretches than this are priced in one batch; more in two, if that saves LEAST_SAVED bins of one
#: stretch each: a batch costs as much.
LEAST_PARTED = 32
LEAST_SAVED = 1000
#: Weight of an observation: the root of its blocks. One long prompt says less than ten short ones.
WEIGHT_BLOCKS = 8.0
MAX_WEIGHT_BLOCKS = 64
#: What is left of the price of an ended session's own blocks.
ENDED_FACTOR = 1e-3
#: Announced returns: chance, and how far off they are as a share of what was announced.
KEPT_CHANCE = 0.9
KEPT_SHARE = 0.25
SLACK_S = 0.5

#: The last place between two prices.
LAST_AHEAD = NUM_PRICES - 1.001

_NEXT_STEPS = np.arange(NUM_PRICES)
_ALL_STEPS: F64 = np.arange(NUM_STEPS, dtype=np.float64)
_ENDS_S: list[float] = EDGES_S[1:].tolist()  # of bins; arithmetic on numpy's floats is slow
_WEIGHTS = [math.sqrt(number / WEIGHT_BLOCKS) for number in range(MAX_WEIGHT_BLOCKS + 1)]

I8 = npt.NDArray[np.int8]
FloatOrMany = TypeVar("FloatOrMany", float, F64)


class Appraiser:
    """Prices stretches in expected uses per second of keeping. Owns their features, bins and prices."""

    def __init__(self, stretches: Stretches) -> None:
        self._stretches = stretches
        self._hazards = Hazards(NUM_KINDS, SIZES, NUM_GAPS, LINES, GAPS_ON_LINE)
        self._rates = UseRates()
        self._seen = Observations()
        #: Serial numbers of stretches and the stretches, one after the other: no tuples, as in ghosts.py.
        self._agenda: list[deque[int]] = [deque() for _ in range(NUM_BINS)]
        self.follows_age = False  # price by age alone: what was learned does worse than that
        self._unknown_prices: F64 = np.zeros(0)  # by step of age; empty: to be made

    def price(self, stretch: int, now: float) -> float:
        """Return the price of a stretch's blocks, hints included. About two microseconds."""
        stretches = self._stretches
        age_s = now - stretches.used_at[stretch]
        if self.follows_age:
            price = _price_by_age(age_s)
        else:
            if stretches.freshness[stretch] != PRICED:
                self._reprice(np.array([stretch], np.int32))
            ahead = step_of(age_s) - stretches.priced_from[stretch]
            ahead = 0.0 if ahead < 0.0 else LAST_AHEAD if ahead > LAST_AHEAD else ahead
            whole = int(ahead)
            first = NUM_PRICES * stretch + whole
            early = stretches.prices[first]
            price = early + (ahead - whole) * (stretches.prices[first + 1] - early)
        price *= stretches.share[stretch]
        back_at = stretches.back_at[stretch]
        if back_at < math.inf:
            said_at = stretches.said_at[stretch]
            spread_s = KEPT_SHARE * (back_at - said_at) + SLACK_S
            if now < 2 * back_at - said_at + spread_s:  # not overdue by as much again
                return max(price, KEPT_CHANCE / (max(0.0, back_at - now) + spread_s))
        return price

    def prices(self, stretches_of: I32, now: float) -> F64:
        """Return the prices (n,) float64 of stretches (n,) int32, hints included, as `price` does for one."""
        stretches = self._stretches
        used_at, share, back_at = (
            np.frombuffer(column)[stretches_of]
            for column in (stretches.used_at, stretches.share, stretches.back_at)
        )
        if self.follows_age:
            prices = _price_by_age(now - used_at)
        else:
            steps = steps_of(now - used_at)
            ahead = self._ahead(stretches_of, steps)
            prices = self._prices_at(stretches_of, ahead)
            due = self._due(stretches_of, prices * share, ahead)
            if len(due):
                of_due = stretches_of[due]
                self._reprice(of_due)  # twice where two rows are of one stretch, which is rare
                prices[due] = self._prices_at(of_due, self._ahead(of_due, steps[due]))
        prices *= share
        for number in (back_at < math.inf).nonzero()[0].tolist():
            prices[number] = self.price(int(stretches_of[number]), now)
        return prices

    def prepare(self, stretches_of: I32) -> None:
        """Compute the prices of stretches (n,) int32 that have none of their age bin."""
        freshness = np.frombuffer(self._stretches.freshness, np.int8)[stretches_of]
        self._reprice(stretches_of[freshness != PRICED])

    def _due(self, stretches_of: I32, known: F64, ahead: F64) -> npt.NDArray[np.intp]:
        """Return the indexes of stretches to price now: all without prices, and of those with outdated ones
        as many as one call may price. `stretches_of`: (n,) int32; `known`, `ahead`: (n,) float64.

        Where there are more, those come first that are cheapest by their `known` prices and were read longest
        ago: such a price counts for half of itself with every step of age, because some fall
        as steeply (a tool call that has not returned). The others stay what they were until a later call.
        """
        freshness = np.frombuffer(self._stretches.freshness, np.int8)[stretches_of]
        due: npt.NDArray[np.intp] = (freshness != PRICED).nonzero()[0]
        if len(due) > MAX_REPRICED:
            is_unpriced = freshness[due] == UNPRICED
            number = max(MAX_REPRICED, int(np.count_nonzero(is_unpriced)))
            if number < len(due):
                behind = np.maximum(ahead[due] - (NUM_PRICES - 1), 0.0)
                known = known[due] * np.exp2(-behind)
                known[is_unpriced] = -math.inf
                due = due[known.argpartition(number)[:number]]
        return due

    def _prices_at(self, stretches_of: I32, ahead: F64) -> F64:
        """Return the prices (n,) float64 of stretches (n,) int32 that are `ahead` (n,) steps of age behind
        their first price, interpolated; the last price beyond them."""
        ahead = np.minimum(np.maximum(ahead, 0.0), LAST_AHEAD)
        whole = ahead.astype(np.int32)
        first = whole + NUM_PRICES * stretches_of
        made = np.frombuffer(self._stretches.prices, np.float32)
        early = made[first]
        prices: F64 = early + (ahead - whole) * (made[first + 1] - early)
        return prices

    def _ahead(self, stretches_of: I32, steps: F64) -> F64:
        """Return the distances (n,) float64 of steps of age from those of the first prices."""
        return steps - np.frombuffer(self._stretches.priced_from, np.int8)[stretches_of]

    def prices_of_new(self, visit: Visit, parts: Sequence[tuple[int, Past]]) -> F64:
        """Return the prices that blocks of each (kind, past) would have if they joined a visit now.

        Shape (num_parts,), float64.
        """
        if self.follows_age:
            return np.full(len(parts), _price_by_age(0.0))
        self.learn()
        kinds = [kind for kind, _ in parts]
        features = [features_of(visit, kind, past.num_uses, past.age_s) for kind, past in parts]
        gap_bins = [gap_bins_of(visit, kind, past.num_uses, past.known_s) for kind, past in parts]
        hazards = self._hazards.hazards(np.array(kinds), np.array(features), np.array(gap_bins))
        prices: F64 = index_at(hazards, np.zeros((len(parts), 1), np.int64))[:, 0]
        for number, (_, past) in enumerate(parts):
            if past.num_uses:  # the measure of rates is a new block
                prices[number] *= self._rates.factor(past.num_uses, past.known_s)
        return prices

    def prices_of_unknown(self, ages_s: F64) -> F64:
        """Return the prices (n,) float64 of blocks of which only the age (n,) float64 in seconds is known."""
        if self.follows_age:
            return _price_by_age(ages_s)
        prices: F64 = np.interp(steps_of(ages_s), _ALL_STEPS, self._prices_by_step())
        return prices

    def price_of_unknown(self, age_s: float) -> float:
        """Return the price of a block of which only the age in seconds is known."""
        if self.follows_age:
            return _price_by_age(age_s)
        step = step_of(age_s)
        first = min(int(step), NUM_STEPS - 2)
        early, late = self._prices_by_step()[first : first + 2].tolist()
        return float(early + (step - first) * (late - early))

    def _prices_by_step(self) -> F64:
        self.learn()
        if not len(self._unknown_prices):
            nothing = np.zeros((1, NUM_FEATURES), np.int64), np.zeros((1, NUM_GAPS), np.int64)
            hazards = self._hazards.hazards(np.array([PRIVATE]), *nothing)
            prices = index_at(hazards, np.arange(NUM_STEPS)[None, :])[0]
            self._unknown_prices = prices * self._rates.factors(0, STEP_EDGES_S[:-1].copy())
        return self._unknown_prices

    def watch(self, stretch: int) -> None:
        """Start to count the age bins that a stretch outlives, from its last use on."""
        self._agenda[0].extend((self._stretches.serial[stretch], stretch))

    def describe(self, visit: Visit) -> None:
        """Set the features of all stretches of a visit, after anything about it changed.

        Of a prompt that is put in many calls hardly any changes: only their prices are made anew."""
        stretches, state = self._stretches, visit.state
        for stretch in visit.stretches:
            kind, num_uses = stretches.kind[stretch], stretches.num_uses[stretch]
            stretches.freshness[stretch] = UNPRICED
            if stretches.described_as[stretch] != state:
                features = features_of(visit, kind, num_uses, stretches.age_s[stretch])
                gap_bins = gap_bins_of(visit, kind, num_uses, stretches.known_s[stretch])
                stretches.describe(stretch, features, gap_bins)
                stretches.described_as[stretch] = state
            if kind < PUBLIC:  # hints of a session apply to its own blocks
                stretches.share[stretch] = ENDED_FACTOR if visit.is_over else 1.0
                stretches.said_at[stretch] = visit.said_at
                stretches.back_at[stretch] = math.inf if visit.is_over else visit.back_at

    def count_use(self, stretch: int, now: float, num_blocks: int) -> None:
        """Add the observation that blocks of a stretch were used, after those of the bins it outlived."""
        stretches = self._stretches
        age_s = now - stretches.used_at[stretch]
        if stretches.kind[stretch] <= PRIVATE:
            self._rates.add_gap(age_s)
        number = bin_of(age_s)
        weight = _weight(stretches.weigh(stretch))
        for outlived in range(stretches.bin[stretch], number):
            self._observe(stretch, outlived, 0.0, weight)
        stretches.bin[stretch] = max(stretches.bin[stretch], number)
        self._observe(stretch, number, 1.0, _weight(num_blocks))

    def _observe(self, stretch: int, bin_number: int, use: float, weight: float) -> None:
        self._seen.add(self._stretches.description_of(stretch), bin_number, use, weight)

    def advance(self, now: float) -> None:
        """Move stretches that outlived an age bin to the next one, each with an observation.

        After a long silence there are many: the calls that follow do the rest. `_observe` is written out:
        every put outlives a dozen bins, and each of them took ten calls.
        """
        stretches, seen, agenda = self._stretches, self._seen, self._agenda
        serials, used_at, bins, freshness = (
            stretches.serial,
            stretches.used_at,
            stretches.bin,
            stretches.freshness,
        )
        num_left = MAX_MOVES
        for number, queue in enumerate(agenda):
            if not queue:
                continue
            latest = now - _ENDS_S[number]
            following = agenda[number + 1] if number + 1 < NUM_BINS else None
            while queue and num_left:
                stretch = queue[1]
                if serials[stretch] == queue[0]:
                    if used_at[stretch] > latest:
                        break
                    if bins[stretch] <= number:
                        start = stretch * DESCRIPTION
                        seen.descriptions.extend(stretches.descriptions[start : start + DESCRIPTION])
                        seen.bins.append(number)
                        seen.uses.append(0.0)
                        num_blocks = stretches.num_rows[stretch] + stretches.num_ghosts[stretch]
                        weight = num_blocks if num_blocks < MAX_WEIGHT_BLOCKS else MAX_WEIGHT_BLOCKS
                        seen.weights.append(_WEIGHTS[weight])
                        bins[stretch] = number + 1
                    if following is not None:
                        following.extend((queue[0], stretch))
                    # Its prices reach a bin further; what was learned meanwhile is worth 0.2 points of hits.
                    if freshness[stretch] == PRICED:
                        freshness[stretch] = OUTDATED
                queue.popleft()
                queue.popleft()
                num_left -= 1
        self.learn(FULL_BATCH)

    def learn(self, batch: int = BATCH) -> None:
        """Learn from what was observed, if there are `batch` observations."""
        if len(self._seen.bins) >= batch:
            self._hazards.learn(self._seen)
            self._rates.fade(len(self._seen))
            self._seen = Observations()
            self._unknown_prices = np.zeros(0)

    def dump(self) -> dict[str, Any]:
        """Return what was learned, for `load`."""
        return {**self._hazards.dump(), "rates": self._rates.dump()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Replace what was learned by a `dump`. Raises ValueError, and changes nothing, if it is damaged."""
        rates = UseRates()
        rates.load(saved.get("rates") if isinstance(saved, Mapping) else None)
        self._hazards.load(saved)
        self._rates = rates
        self._unknown_prices = np.zeros(0)

    def _reprice(self, numbers: I32) -> None:
        """Compute and store the prices of stretches (n,) int32.

        Many are computed in two batches, cut where that saves most: older ones have fewer bins before them.
        """
        bins = np.frombuffer(self._stretches.bin, np.int8)[numbers]
        if len(numbers) >= LEAST_PARTED:
            order = bins.argsort()
            numbers, bins = numbers[order], bins[order]
            num_saved = (bins - bins[0]) * np.arange(len(bins), 0, -1)
            middle = int(num_saved.argmax())
            if num_saved[middle] >= LEAST_SAVED:
                self._reprice_together(numbers[:middle], bins[:middle])
                numbers, bins = numbers[middle:], bins[middle:]
        self._reprice_together(numbers, bins)

    def _reprice_together(self, numbers: I32, bins: I8) -> None:
        if not len(numbers):
            return
        self.learn()
        stretches = self._stretches
        described = np.frombuffer(stretches.descriptions, np.int16).reshape(-1, DESCRIPTION)[numbers]
        kinds, features, gap_bins = parts_of(described, NUM_FEATURES)
        first_steps = bins * STEPS_PER_BIN
        first_bin = min(int(bins.min()), NUM_BINS - 1)  # one that outlived them all is still in the last one
        steps = np.minimum(first_steps[:, None] + _NEXT_STEPS, NUM_STEPS - 1)
        made = index_at(self._hazards.hazards(kinds, features, gap_bins, first_bin), steps, first_bin)
        if self._rates.exponent:
            num_uses = np.frombuffer(stretches.num_uses, np.int64)[numbers, None]
            known_s = np.frombuffer(stretches.known_s)[numbers, None]
            made *= self._rates.factors(num_uses, known_s + STEP_EDGES_S[steps])
        np.frombuffer(stretches.prices, np.float32).reshape(-1, NUM_PRICES)[numbers] = made
        np.frombuffer(stretches.priced_from, np.int8)[numbers] = first_steps
        np.frombuffer(stretches.freshness, np.int8)[numbers] = PRICED


def _price_by_age(age_s: FloatOrMany) -> FloatOrMany:
    """Return one use per age (float or (n,) float64, in seconds): LRU, in the unit of all prices."""
    return 1.0 / (age_s + MIN_GAP_S)


def _weight(num_blocks: int) -> float:
    return _WEIGHTS[min(num_blocks, MAX_WEIGHT_BLOCKS)]
