"""`kvtier dictionary`: dictionaries for codec zstd. Works on files; needs no daemon."""

from pathlib import Path

import click

from ...tiers.codecs.dictionaries import SUFFIX, DictionaryError, train
from .quantities import Size
from .target import Failed


@click.group()
def dictionary() -> None:
    """Learn what payloads have in common, for codec zstd.

    For keys and values of transformers codec planes does better without one: measure before you use it.

    \b
    Example:
      kvtier dictionary train states/*.bin --out states.zdict
    """


@dictionary.command("train")
@click.argument(
    "samples", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--bytes",
    "capacity_bytes",
    default="110KiB",
    show_default=True,
    type=Size(least=1),
    help="Its size at most.",
)
@click.option(
    "--sample-bytes",
    default="64KiB",
    show_default=True,
    type=Size(least=1),
    help="Files are cut into pieces so long.",
)
def train_command(samples: tuple[Path, ...], out: Path, capacity_bytes: int, sample_bytes: int) -> None:
    """Train a dictionary on the files SAMPLES, payloads as they are put; write it to --out NAME.zdict.

    \b
    Example:
      kvtier dictionary train samples/* --out kv.zdict
    """
    if out.suffix != SUFFIX:
        raise click.UsageError(f"--out {out}: dictionaries are called NAME{SUFFIX}")
    try:
        whole = [path.read_bytes() for path in samples]
        pieces = [
            payload[start : start + sample_bytes]
            for payload in whole
            for start in range(0, len(payload), sample_bytes)
        ]
        made = train(pieces, capacity_bytes)
        out.write_bytes(made)
    except (DictionaryError, OSError) as problem:
        raise Failed(str(problem)) from problem
    click.echo(f"{out}: {len(made)} bytes from {len(pieces)} samples")
