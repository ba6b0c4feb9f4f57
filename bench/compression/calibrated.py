"""`python -m bench.compression.calibrated [mha] [gqa]`: calibrated bits beside uniform bits.

Per model and coder: sensitivities on one text, then, at sizes, the allocation from them and the same width
for every head, both through the codec the daemon uses, both asked about files that neither training nor
calibration has seen. K and V are stated apart. Trains the models first where they are missing.

More rows are asked about than measured on: a change of perplexity of a tenth of a per cent has a standard
error as large with 16 rows, and half of that with 72, which is what the text has.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: its threads spin otherwise
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from bench.compression.train import RECIPES, folder_of, is_trained, train
from bench.machine import print_machine
from bench.table import render
from kvtier.appliance.calibrate.allocation import allocate
from kvtier.appliance.calibrate.coding import KINDS, Coders, Kind, menu
from kvtier.appliance.calibrate.search import Checked, CodedModel, check, uniform
from kvtier.appliance.calibrate.sensitivity import measure
from kvtier.appliance.calibrate.state import Measurements
from kvtier.appliance.calibrate.subject import Subject
from kvtier.appliance.calibrate.texts import Cut, LoadedModel, load, text_digest, tokens_of
from kvtier.tiers.codecs.lossy.quantised import INSETS

RATIOS: dict[Kind, tuple[float, ...]] = {"int": (4.0, 4.5, 5.3, 6.0), "transform": (4.5, 5.3, 7.0, 9.0)}
BLOCK_TOKENS = 128
HEADER = ("allocation", "ratio", "K bits", "V bits", "perplexity", "±", "KL", "flips", "attention error")


def rows_of(loaded: LoadedModel, name: str, part: str, num_rows: int) -> Subject:
    """Return `num_rows` rows of one of the texts beside the model."""
    cut = Cut(num_rows, 768, 256)
    path = folder_of(name) / f"{part}.txt"
    tokens = tokens_of(loaded, path.read_text(), cut, path, num_rows)
    return Subject(loaded.model, tokens, cut.prefix_tokens, loaded.dtype, rows_per_pass=4)


def compare(name: str, kind: Kind, num_rows: int, num_asked: int) -> str:
    """Return the table of one model and coder."""
    loaded = load(str(folder_of(name)), "cpu", None)
    measured_on = rows_of(loaded, name, "calibrate", num_rows)
    asked = rows_of(loaded, name, "heldout", num_asked)
    coders = Coders(measured_on.past, loaded.dtype)
    run: dict[str, str | int | float] = {
        "model": loaded.digest.hex(),
        "rows": num_rows,
        "kind": kind,
        "text": text_digest_of(measured_on),
        "insets": str(INSETS),
    }
    with Measurements(folder_of(name) / f"{kind}.measured", run) as state:
        choices = measure(measured_on, coders, kind, BLOCK_TOKENS, state)
    model = CodedModel(loaded.digest, loaded.dtype, BLOCK_TOKENS, coders)
    rows = [
        row("calibrated", check(model, asked, allocate(choices, bits=16 / ratio))) for ratio in RATIOS[kind]
    ]
    rows.append([])
    even = [coding for coding in menu(kind) if coding.axis == "token"]
    rows += [row(f"uniform {coding}", check(model, asked, uniform(choices, coding))) for coding in even]
    return render(HEADER, rows)


def text_digest_of(subject: Subject) -> str:
    """Return a short name of the past that sensitivities are measured on."""
    import torch

    return text_digest(torch.from_numpy(subject.past.view("int16")))


def row(name: str, one: Checked) -> list[str]:
    """Return one line of the table."""
    planes: list[list[float]] = [[], []]
    for unit, choice in one.allocated.items():
        planes[unit.plane].append(choice.bits)
    quality = one.quality
    return [
        name,
        f"{one.ratio:.2f}×",
        *(f"{sum(bits) / len(bits):.2f}" for bits in planes),
        f"{100 * quality.ppl_increase:+.3f} %",
        f"{100 * quality.nll_error:.3f}",
        f"{quality.kl:.2e}",
        f"{100 * quality.flips:.2f} %",
        f"{100 * quality.attention_error:.2f} %",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compression.calibrated", description=__doc__)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES), help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--coder", choices=KINDS, action="append", help="default: both")
    parser.add_argument("--rows", type=int, default=16, help="of 1,024 tokens to measure on")
    parser.add_argument("--asked", type=int, default=72, help="of 1,024 tokens, held out")
    args = parser.parse_args()
    print_machine()
    for name in args.recipes:
        if not is_trained(name):
            train(name, RECIPES[name])
        for kind in args.coder or KINDS:
            print(
                f"\n{name}, {kind}: held-out text\n{compare(name, kind, args.rows, args.asked)}", flush=True
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
