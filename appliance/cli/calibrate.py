"""`kvtier calibrate`: write the smallest compression profile of a model within a budget of quality."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from ...tiers.codecs.base import CodecError
from ..calibrate.budget import Budget, parse_budget
from ..calibrate.state import StateError
from ..observability.pictures import CannotDraw, check_drawing, check_target
from .output import console, print_json, talk
from .target import Failed, json_option

if TYPE_CHECKING:
    from ..calibrate.coding import Kind
    from ..calibrate.run import CalibrationOutcome

_MISSING = "calibrating needs torch and transformers; pip install 'kvtier[torch,charts]' transformers"


class Bars:
    """Bars of progress on a terminal; one line a stage elsewhere."""

    def __init__(self) -> None:
        self._progress = Progress(
            *Progress.get_default_columns()[:2],
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=talk(),
            transient=True,
            disable=not sys.stderr.isatty(),
        )

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._progress.stop()

    def begin(self, what: str, num_steps: int) -> Callable[[], None]:
        """Start a bar."""
        if self._progress.disable:
            talk().print(f"{what} …")
        task = self._progress.add_task(what, total=num_steps)
        return lambda: self._progress.advance(task)


@click.command()
@click.argument("model_name", metavar="MODEL")
@click.option(
    "--budget", "budget_text", required=True, metavar="BUDGET", help="'ppl +0.5%', 'kl 0.002' or 'ratio 4.5'."
)
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Text like that the model will read; a third is measured on, the rest checked on.",
)
@click.option(
    "--out", default="profile.yaml", show_default=True, type=click.Path(path_type=Path, dir_okay=False)
)
@click.option(
    "--report",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page with pictures.  [default: beside the profile]",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Measurements; a stopped run goes on from them.  [default: beside the profile]",
)
@click.option(
    "--rows", type=click.IntRange(2), default=8, show_default=True, help="Rows of text to measure on."
)
@click.option(
    "--prefix", type=click.IntRange(1), default=768, show_default=True, help="Tokens stored, a row."
)
@click.option(
    "--asked", type=click.IntRange(2), default=256, show_default=True, help="Tokens asked for, a row."
)
@click.option(
    "--block-tokens", type=click.IntRange(1), default=128, show_default=True, help="As the runtime cuts."
)
@click.option(
    "--coder",
    type=click.Choice(["int", "transform"]),
    default="int",
    show_default=True,
    help="int: 2 to 8 bits a value, fast; transform: half of that, for the coldest tiers.",
)
@click.option("--dtype", help="Of the weights and the cache.  [default: the checkpoint's]")
@click.option("--device", default="cpu", show_default=True, help="E.g. cuda.")
@click.option(
    "--model-digest",
    metavar="HEX",
    help="What the runtime's namespaces call this model.  [default: what the transformers client does]",
)
@json_option
def calibrate(
    model_name: str,
    budget_text: str,
    data: Path,
    out: Path,
    page: Path | None,
    state: Path | None,
    rows: int,
    prefix: int,
    asked: int,
    block_tokens: int,
    coder: "Kind",
    dtype: str | None,
    device: str,
    model_digest: str | None,
    as_json: bool,
) -> None:
    """Write the smallest compression profile of MODEL within a budget of quality.

    Measures how sensitive each head of its keys and values is. MODEL is a folder with a Hugging Face model,
    or one in the hub's local cache; nothing is fetched. A namespace that names the profile's digest is
    then stored by it.

    \b
    Example:
      kvtier calibrate ./llama --budget "ppl +0.5%" --data prompts.txt --out near-lossless.yaml
    """
    budget, digest = _budget_and_digest(budget_text, model_digest or "")
    page = page or out.with_suffix(".html")
    _check_outputs(out, page)
    try:
        from ..calibrate.run import Wish, write
        from ..calibrate.run import calibrate as run
        from ..calibrate.search import NotKept
        from ..calibrate.subject import Unsuited
        from ..calibrate.texts import Cut, load
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "transformers"):
            raise
        raise Failed(_MISSING) from error
    try:
        with Bars() as bars:
            loaded = load(model_name, device, dtype)
            wish = Wish(budget, data, Cut(rows, prefix, asked), block_tokens, coder, digest)
            outcome = run(loaded, wish, state or out.with_suffix(".measured"), bars.begin)
        write(outcome, model_name, out, page)
    except (Unsuited, StateError, NotKept, CodecError, OSError) as error:
        raise Failed(str(error)) from error
    _tell(outcome, out, as_json)


def _budget_and_digest(budget_text: str, digest_text: str) -> tuple[Budget, bytes]:
    """Return the budget and the model's digest (empty: the default one). Raises UsageError."""
    try:
        budget, digest = parse_budget(budget_text), bytes.fromhex(digest_text)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if digest and not 16 <= len(digest) <= 64:
        raise click.UsageError(f"--model-digest is 16 to 64 bytes in hex, not {len(digest)}")
    return budget, digest


def _check_outputs(out: Path, page: Path) -> None:
    """Check, before hours of measuring, that both files can be written. Raises UsageError and Failed."""
    if out.suffix != ".yaml":
        raise click.UsageError(f"--out {out}: profiles are called NAME.yaml")
    try:
        check_target(page)
        check_drawing()
    except (CannotDraw, OSError) as error:
        raise Failed(str(error)) from error


def _tell(outcome: "CalibrationOutcome", out: Path, as_json: bool) -> None:
    if as_json:
        digest = outcome.profile.digest.hex()
        print_json({"profile": str(out), "digest": digest, **outcome.profile.calibration})
        return
    quality = outcome.chosen.quality
    console().print(
        f"{out}: {outcome.chosen.ratio:.2f}× smaller, perplexity {100 * quality.ppl_increase:+.3f} % "
        f"± {100 * quality.nll_error:.3f}, KL {quality.kl:.2e}, "
        f"first choice changed in {100 * quality.flips:.2f} %\n"
        f"digest {outcome.profile.digest.hex()}"
    )
