"""The group of all commands."""

import click

from ... import __version__
from .bench import bench
from .calibrate import calibrate
from .dictionary import dictionary
from .doctor import doctor
from .drain import drain
from .evict import evict
from .inspect import inspect
from .policy import policy
from .profile import profile
from .record import record
from .replay import replay
from .serve import serve
from .status import status
from .story import story
from .tenant import tenant
from .top import top
from .why import why


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kvtier")
def cli() -> None:
    """Keep the KV cache of language models in tiers, and know what is kept.

    Data goes to stdout, talk to stderr. Exit codes: 0 ok, 1 failed, 2 usage or refused settings,
    3 no daemon reachable, 4 this user may not open its socket.

    \b
    Example:
      kvtier serve --policy policy.yaml &
      kvtier doctor
      kvtier status
    """


for command in (
    serve,
    status,
    inspect,
    doctor,
    bench,
    calibrate,
    evict,
    drain,
    story,
    why,
    top,
    record,
    replay,
    policy,
    profile,
    dictionary,
    tenant,
):
    cli.add_command(command)
