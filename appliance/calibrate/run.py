"""One calibration from beginning to end; what shows progress and where it ends up is the caller's matter."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from ...tiers.codecs.lossy.profile import Profile, Scalar
from ...tiers.codecs.lossy.profile_file import write_profile
from . import report
from .allocation import allocate
from .budget import Budget
from .coding import Coders, Coding, Kind, menu
from .search import MAX_CHECKS, Checked, CodedModel, check, profile_of, search, uniform
from .sensitivity import Choices, measure, num_measurements
from .state import Measurements
from .subject import Unsuited
from .texts import Cut, LoadedModel, subjects, text_digest, tokens_of

CURVE_BITS: Final[dict[Kind, tuple[float, ...]]] = {
    "int": (2.75, 3.0, 3.5, 4.0, 4.5),
    "transform": (1.5, 1.75, 2.0, 2.25, 2.75, 3.25),
}


#: Tells what begins and of how many steps; returns what is called after each.
Begin: TypeAlias = Callable[[str, int], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for."""

    budget: Budget
    data: Path
    cut: Cut
    block_tokens: int
    coder: Kind = "int"
    digest: bytes = b""  # of the model, as its runtime names it; empty: as transformers does


@dataclass(frozen=True, slots=True)
class CalibrationOutcome:
    """What came of it."""

    profile: Profile
    chosen: Checked
    curve: tuple[Checked, ...]
    uniform: tuple[Checked, ...]
    choices: Choices


def calibrate(loaded: LoadedModel, wish: Wish, state_path: Path, begin: Begin) -> CalibrationOutcome:
    """Return a profile within the wish's budget, measured and checked.

    Raises Unsuited, StateError, NotKept and OSError."""
    cut = wish.cut
    if cut.prefix_tokens % wish.block_tokens or cut.num_rows < 2 or cut.asked_tokens < 2:
        raise Unsuited(
            f"a prefix of {cut.prefix_tokens} tokens is not whole blocks of {wish.block_tokens}; "
            "take a multiple"
            if cut.prefix_tokens % wish.block_tokens
            else "too little to measure on; take two rows and two asked tokens, or more"
        )
    tokens = tokens_of(loaded, wish.data.read_text("utf-8", errors="replace"), cut, wish.data)
    measured_on, checked_on = subjects(loaded, tokens, cut)
    coders = Coders(measured_on.past, loaded.dtype)
    run: dict[str, str | int | float] = {
        "model": loaded.digest.hex(),
        "text": text_digest(tokens),
        "prefix_tokens": cut.prefix_tokens,
        "block_tokens": wish.block_tokens,
        "dtype": loaded.dtype,
    }
    with Measurements(state_path, run) as state:
        advance = begin("measuring heads", num_measurements(measured_on, wish.coder))
        choices = measure(measured_on, coders, wish.coder, wish.block_tokens, state, advance)
    model = CodedModel(wish.digest or loaded.digest, loaded.dtype, wish.block_tokens, coders)
    advance = begin("searching", MAX_CHECKS)
    chosen = search(model, checked_on, choices, wish.budget, lambda _: advance())
    sizes, even = CURVE_BITS[wish.coder], _uniform_codings(wish.coder)
    advance = begin("comparing", len(sizes) + len(even))
    curve, same = [chosen], list[Checked]()
    for bits in sizes:
        curve.append(check(model, checked_on, allocate(choices, bits=bits)))
        advance()
    for coding in even:
        same.append(check(model, checked_on, uniform(choices, coding)))
        advance()
    codings = {unit: choice.coding for unit, choice in chosen.allocated.items()}
    quality = chosen.quality
    found: dict[str, Scalar] = {
        "budget": str(wish.budget),
        "text": run["text"],
        "rows_measured": cut.num_rows,
        "rows_checked": len(tokens) - cut.num_rows,
        "block_tokens": wish.block_tokens,
        "ratio": round(chosen.ratio, 3),
        "ppl_increase": round(quality.ppl_increase, 6),
        "ppl_error": round(quality.nll_error, 6),
        "kl": round(quality.kl, 6),
        "flips": round(quality.flips, 5),
        "attention_error": round(quality.attention_error, 5),
    }
    profile = profile_of(model, checked_on.past, codings, found)
    return CalibrationOutcome(profile, chosen, tuple(curve), tuple(same), choices)


def _uniform_codings(kind: Kind) -> list[Coding]:
    return [coding for coding in menu(kind) if coding.axis == "token"]


def write(outcome: CalibrationOutcome, name: str, out: Path, page: Path) -> None:
    """Write the profile, and the report beside it. Raises OSError."""
    write_profile(outcome.profile, out)
    quality = outcome.chosen.quality
    facts = {
        "profile": outcome.profile.digest.hex(),
        "model": outcome.profile.model_digest.hex(),
        "ratio": f"{outcome.chosen.ratio:.2f}× ({outcome.chosen.stored_bits:.2f} bits a value)",
        "perplexity": f"{quality.exact_ppl:.3f}, with the profile {100 * quality.ppl_increase:+.3f} % "
        f"(standard error {100 * quality.nll_error:.3f} %)",
        "divergence": f"{quality.kl:.2e} nats a token, {outcome.chosen.predicted_loss:.2e} predicted",
        "first choice changed": f"{100 * quality.flips:.2f} % of tokens",
        "attention output": f"relative error {100 * quality.attention_error:.2f} %",
        **{name.replace("_", " "): str(value) for name, value in outcome.profile.calibration.items()
           if name in ("budget", "text", "rows_measured", "rows_checked", "block_tokens")},
    }  # fmt: skip
    title = f"kvtier calibrate: {name}"
    page.write_text(report.page(title, facts, outcome.chosen, outcome.curve, outcome.uniform), "utf-8")
