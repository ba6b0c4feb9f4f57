"""Proportional hazards: the chance of a use by age, for any kind of block, learned online.

    hazard(age bin | block) = base(kind, age bin) * exp(sum of the effects of its features)

`base` is a life table per kind of block (new, tail, private, shared): uses over blocks at risk, each weighted
with its own exp(effects). Blocks that are never used again are counted by the bins they outlived. A cell with
few observations leans on the same bin of all kinds together, and that on PRIOR_HAZARD. A constant hazard per
geometric bin makes the price fall with age alone: before anything is learned, this is LRU.

`effects` are logarithms of factors, one per feature value (turn, lengths, gap so far, ...), and start at
nothing. Each is a Newton step per batch on the Poisson likelihood, damped by PRIOR_PRECISION. Some features
are an age relative to an earlier gap of the same session, so that "about as long as last time" is one value.

Two things make that quick where there is much to learn, and quiet where there is nothing:

- A feature has a *trust*, a factor of all its effects. It grows while they predict the next batch, and falls
  while they do not: noise of one batch points the wrong way in the next as often as not.
- The values of some features are numbers (uses; age over mean gap, both logarithms). These have a *slope* as
  well, which all values learn together: with ten observations one knows whether what was used more often is
  used again sooner, with a hundred how much sooner after the third use than after the second.

Both cost nothing when a price is computed: they are folded into the effects that it reads (`_folded`).

Sources: Cox, J. R. Stat. Soc. B 34 (1972); Breslow's estimate of the base, same volume; Kaplan and Meier, J.
Am. Stat. Assoc. 53 (1958). Rejected: a logistic model by AdaGrad (its learning rate is a parameter, and bins
where nothing ever happens unlearn the prior too slowly); effects that differ by age (half a point on
conversations of agents, nothing on chats, for seven times the learning); tables per combination of features
(too many for the first minutes, and these decide); means of earlier effects (Polyak), longer steps, learning
from old observations again (each gains where much is to be learned and loses as much elsewhere); anything
trained beforehand.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .ages import F64, NUM_BINS

I64 = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer[Any]]
Whole = TypeVar("Whole", bound=np.integer[Any])

PRIOR_HAZARD = 0.0474  # of a bin; its value does not change any order
PRIOR_WEIGHT = 4.0  # observations that it counts for
PRIOR_PRECISION = 20.0
STEP = 0.3  # of a Newton step: several effects explain the same surprise
MAX_EFFECT = 6.0
MAX_HAZARD = 0.95
#: Weights at which counts halve: habits change, and the tables follow.
MAX_AT_RISK = 20_000.0
MAX_PRECISION = 2_000.0
#: Trust: its limit, how much evidence it takes to doubt it, and the most that counts.
MAX_TRUST = 1.5
TRUST_PRECISION = 20.0
MAX_TRUST_PRECISION = 300.0
#: Doublings to either side of a gap that differ on its line.
MAX_DOUBLINGS = 4.0
#: Share of a bin's two neighbours in its counts, each: hazards are smooth in age.
NEIGHBOUR = 0.5
NUM_OFFSETS = 64  # values of an age relative to a gap
FORMAT = 2  # of a dump; another one whenever a kind, a feature or a bin means something else
MAX_LOADED = 1e9  # no number that was learned is larger

#: Value of an age bin relative to a gap: [1 + bin of the gap, bin of the age]. Row 0: there is no gap.
_OFFSETS: I64 = np.clip(
    np.arange(NUM_BINS)[None, :] - np.arange(NUM_BINS + 1)[:, None] + NUM_OFFSETS // 2, 1, NUM_OFFSETS - 1
)
_OFFSETS[0] = 0


class Observations:
    """Uses of stretches by bin, until they are learned. Plain columns, filled one at a time."""

    def __init__(self) -> None:
        self.descriptions = array("h")  # as many numbers each: kind, features, gap bins
        self.bins: list[int] = []
        self.uses: list[float] = []
        self.weights: list[float] = []

    def add(self, description: "array[int]", bin_number: int, use: float, weight: float) -> None:
        """Append that a stretch was used in a bin (`use` 1), or outlived it (0)."""
        self.descriptions.extend(description)
        self.bins.append(bin_number)
        self.uses.append(use)
        self.weights.append(weight)

    def __len__(self) -> int:
        return len(self.bins)


def parts_of(
    described: npt.NDArray[Whole], num_features: int
) -> tuple[npt.NDArray[Whole], npt.NDArray[Whole], npt.NDArray[Whole]]:
    """Return kinds, features and gap bins of descriptions, as views.

    Shapes: (n,), (n, num_features) and (n, num_gaps) of (n, 1 + num_features + num_gaps).
    """
    return described[:, 0], described[:, 1 : 1 + num_features], described[:, 1 + num_features :]


class Hazards:
    """Learns hazards and returns them. Kinds and feature values are small numbers; value 0: no effect."""

    def __init__(
        self,
        num_kinds: int,
        sizes: Sequence[int],
        num_gaps: int,
        lines: Mapping[int, Sequence[float]] | None = None,
        gaps_on_line: Collection[int] = (),
    ) -> None:
        """`sizes`: how many values each feature has; they are numbered in one go.
        `num_gaps`: earlier gaps that an age is compared with.
        `lines`: where the values lie of each feature that has a slope; `gaps_on_line`: gaps that have one."""
        num_values = sum(sizes)
        self._gap_starts = num_values + NUM_OFFSETS * np.arange(num_gaps)
        self._used = np.zeros((num_kinds, NUM_BINS))
        self._at_risk = np.zeros((num_kinds, NUM_BINS))
        self._feature_of: I64 = np.repeat(
            np.arange(len(sizes) + num_gaps), [*sizes, *[NUM_OFFSETS] * num_gaps]
        )
        num_effects, num_features = len(self._feature_of), len(sizes) + num_gaps
        self._effects = np.zeros(num_effects)
        self._precision = np.ones(num_effects)
        self._trust = np.ones(num_features)
        self._trust_precision = np.zeros(num_features)
        self._line = np.zeros(num_effects)  # where each value lies; 0 where it has no line
        for feature, places in (lines or {}).items():
            self._line[self._feature_of == feature] = places
        for gap in gaps_on_line:
            start = num_values + NUM_OFFSETS * gap
            doublings = (np.arange(1, NUM_OFFSETS) - NUM_OFFSETS // 2) / 2
            self._line[start + 1 : start + NUM_OFFSETS] = np.clip(doublings, -MAX_DOUBLINGS, MAX_DOUBLINGS)
        self._slopes = np.zeros(num_features)
        self._slope_precision = np.zeros(num_features)
        self._folded = np.zeros(num_effects)  # effects as prices read them
        #: Folded effects of gaps by age bin: rows are 1 + the bin of a gap, one gap after the other.
        self._folded_of_gaps = np.zeros((num_gaps * len(_OFFSETS), NUM_BINS))
        self._first_gaps = len(_OFFSETS) * np.arange(num_gaps)
        self._base: F64 = np.full((num_kinds, NUM_BINS), PRIOR_HAZARD)
        self._is_current = True

    def hazards(self, kinds: Integers, features: Integers, gap_bins: Integers, first_bin: int = 0) -> F64:
        """Return (n, NUM_BINS - first_bin) hazards of n stretches, from an age bin on. In memory bin by bin.

        `kinds`: (n,); `features`: (n, num_features) feature values; `gap_bins`: (n, num_gaps), each 1 + the
        bin of an earlier gap, or 0 when there is none.
        """
        log_factor = np.empty((NUM_BINS - first_bin, len(kinds)))
        log_factor[:] = self._folded[features].sum(axis=1)
        has_gap = np.flatnonzero(gap_bins.any(axis=1))  # most have none, and all bins of theirs are alike
        if len(has_gap):
            gaps = gap_bins[has_gap] + self._first_gaps
            log_factor[:, has_gap] += self._folded_of_gaps[:, first_bin:][gaps].sum(axis=1).T
        np.minimum(np.maximum(log_factor, -MAX_EFFECT, out=log_factor), MAX_EFFECT, out=log_factor)
        hazards: F64 = np.exp(log_factor, out=log_factor)
        hazards *= self._current_base()[:, first_bin:].T.take(kinds, axis=1)
        np.minimum(hazards, MAX_HAZARD, out=hazards)
        return hazards.T

    def learn(self, seen: Observations) -> None:
        """Update base hazards, effects, trust and slopes by one batch of observations."""
        described = np.frombuffer(seen.descriptions, np.int16).astype(np.int64).reshape(len(seen), -1)
        kinds, values, gap_bins = parts_of(described, described.shape[1] - 1 - len(self._gap_starts))
        bins, used, weights = np.array(seen.bins), np.array(seen.uses), np.array(seen.weights)
        offsets = _OFFSETS[gap_bins, bins[:, None]] + self._gap_starts
        values = np.concatenate((values, offsets), axis=1)
        log_factor = np.clip(self._folded[values].sum(axis=1), -MAX_EFFECT, MAX_EFFECT)
        factor = np.exp(log_factor)
        # A block that was used in a bin was at risk for half of it.
        at_risk = weights * (1.0 - 0.5 * used)
        expected = at_risk * np.minimum(self._current_base()[kinds, bins] * factor, MAX_HAZARD)
        happened = weights * used

        cell = kinds * NUM_BINS + bins
        self._used.ravel()[:] += np.bincount(cell, happened, self._used.size)
        self._at_risk.ravel()[:] += np.bincount(cell, at_risk * factor, self._used.size)
        size, flat = len(self._effects), values.ravel()
        num_per_row = values.shape[1]
        surprise = _sums(flat, np.repeat(happened - expected, num_per_row), size)
        evidence = _sums(flat, np.repeat((happened + expected) / 2, num_per_row), size)
        self._move_trust(surprise, evidence)
        self._precision += evidence
        self._effects += STEP * surprise / (PRIOR_PRECISION + self._precision)
        self._effects[0] = 0.0
        self._effects[self._gap_starts] = 0.0
        np.minimum(self._precision, MAX_PRECISION, out=self._precision)
        self._fold()
        is_full = self._at_risk > MAX_AT_RISK
        self._at_risk[is_full] /= 2
        self._used[is_full] /= 2
        self._is_current = False

    def _move_trust(self, surprise: F64, evidence: F64) -> None:
        """Move trust and slopes by Newton steps on factors that many values share.

        `surprise`, `evidence`: (num_effects,) float64."""
        feature_of, num = self._feature_of, len(self._trust)
        self._trust_precision += _sums(feature_of, evidence * self._effects**2, num)
        foretold = _sums(feature_of, surprise * self._effects, num)
        self._trust += foretold / (TRUST_PRECISION + self._trust_precision)
        np.clip(self._trust, 0.0, MAX_TRUST, out=self._trust)
        np.minimum(self._trust_precision, MAX_TRUST_PRECISION, out=self._trust_precision)
        self._slope_precision += _sums(feature_of, evidence * self._line**2, num)
        tilted = _sums(feature_of, surprise * self._line, num)
        self._slopes += STEP * tilted / (PRIOR_PRECISION + self._slope_precision)
        np.minimum(self._slope_precision, MAX_PRECISION, out=self._slope_precision)

    def _fold(self) -> None:
        """Fold trust and slopes into the effects that prices read."""
        self._folded = self._trust[self._feature_of] * self._effects
        self._folded += self._slopes[self._feature_of] * self._line
        of_gaps = self._folded[_OFFSETS + self._gap_starts[:, None, None]]
        self._folded_of_gaps = of_gaps.reshape(self._folded_of_gaps.shape)

    def dump(self) -> dict[str, Any]:
        """Return everything learned, to be loaded after a restart. Lists of numbers."""
        return {"format": FORMAT, **{name: column.tolist() for name, column in self._columns().items()}}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Replace what was learned by a `dump`. Raises ValueError, and changes nothing, if it is damaged."""
        if not isinstance(saved, Mapping) or saved.get("format") != FORMAT:
            raise ValueError("what was learned is of another version of the forecast; start without it")
        taken = {}
        for name, mine in self._columns().items():
            try:
                column = np.array(saved.get(name), np.float64)
            except (TypeError, OverflowError) as error:
                raise ValueError(f"what was learned holds something else than numbers: {error}") from error
            if column.shape != mine.shape:
                raise ValueError("what was learned is of another version of the forecast; start without it")
            lowest = {"effects": -MAX_LOADED, "slopes": -MAX_LOADED, "precision": 1.0}.get(name, 0.0)
            highest = MAX_TRUST if name == "trust" else MAX_LOADED
            if not ((column >= lowest) & (column <= highest)).all():  # false for NaN, too
                raise ValueError(f"what was learned holds impossible {name}; start without it")
            taken[name] = column
        for name, mine in self._columns().items():
            mine[...] = taken[name]
        self._fold()
        self._is_current = False

    def _columns(self) -> dict[str, F64]:
        return {
            "used": self._used,
            "at_risk": self._at_risk,
            "effects": self._effects,
            "precision": self._precision,
            "trust": self._trust,
            "trust_precision": self._trust_precision,
            "slopes": self._slopes,
            "slope_precision": self._slope_precision,
        }

    def _current_base(self) -> F64:
        if not self._is_current:
            used, at_risk = self._used.sum(axis=0), self._at_risk.sum(axis=0)
            root = (PRIOR_WEIGHT * PRIOR_HAZARD + used) / (PRIOR_WEIGHT + at_risk)
            used, at_risk = _smoothed(self._used), _smoothed(self._at_risk)
            self._base = (PRIOR_WEIGHT * root + used) / (PRIOR_WEIGHT + at_risk)
            self._is_current = True
        return self._base


def _sums(where: I64, parts: F64, num: int) -> F64:
    """Return the sums (num,) float64 of `parts` (n,) by their numbers `where` (n,) int64."""
    return np.asarray(np.bincount(where, parts, num), np.float64)


def _smoothed(counts: F64) -> F64:
    """Return counts (num_kinds, NUM_BINS) with a share of both neighbours in age added."""
    smoothed = counts.copy()
    smoothed[:, 1:] += NEIGHBOUR * counts[:, :-1]
    smoothed[:, :-1] += NEIGHBOUR * counts[:, 1:]
    return smoothed
