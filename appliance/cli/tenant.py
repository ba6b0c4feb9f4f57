"""`kvtier tenant`: what an administrator does for a tenant that is no setting."""

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import click
from rich.table import Table

from ...v1 import admin_pb2
from ..config import check_name
from ..config.units import about_bytes
from ..security.tokens import hash_of, make_token
from .output import console, plain, print_json, talk
from .target import TIMEOUT_S, Failed, admin, json_option, resolve, target_option

ERASE_TIMEOUT_S = 300.0  # a tenant may have a million blocks


@click.group()
def tenant() -> None:
    """Make credentials for tenants, see what they take, erase them.

    \b
    Example:
      kvtier tenant token ci --out ci.token >> /etc/kvtier/tokens
      kvtier tenant list
      kvtier tenant erase acme
    """


@tenant.command()
@click.argument("name")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the token to a new file that only its owner can read.",
)
def token(name: str, out: Path | None) -> None:
    """Make a bearer token called NAME. The line that the daemon keeps goes to stdout, the token into a file.

    Without --out the token goes to stdout and the line to stderr; a file that others can read is refused
    there.

    \b
    Example:
      kvtier tenant token ci --out ci.token >> /etc/kvtier/tokens
    """
    try:
        check_name(name)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    made = make_token()
    line = f"{name} {hash_of(made)}"
    if out is not None:
        _write_secret(out, made)
        click.echo(line)
        return
    _refuse_shared(sys.stdout.fileno)
    talk().print(line, highlight=False, soft_wrap=True)
    click.echo(made)


def _write_secret(path: Path, text: str) -> None:
    """Write `text` to a file of mode 0600 that is not there yet. Raises Failed."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise Failed(f"{path} is there already; remove it, or name another file") from None
    except OSError as error:
        raise Failed(f"cannot write {path}: {error.strerror}") from error
    with open(descriptor, "w") as file:
        file.write(f"{text}\n")


class _Commented(Failed):
    """Failed, on a line that the file of tokens takes for a comment: stderr may be appended to that."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"# {self.message}", file=file, err=file is None)


def _refuse_shared(descriptor_of: Callable[[], int]) -> None:
    """Raise Failed when stdout is a file that others can read.

    Taking their rights away (fchmod) was rejected: a process that has opened the file already could still
    read what is written after it, and the mode of a file is for its owner to change.
    """
    try:
        status = os.fstat(descriptor_of())
    except (OSError, ValueError):  # no descriptor: a stream inside this process
        return
    if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
        raise _Commented(
            f"stdout is a file of mode {stat.S_IMODE(status.st_mode):04o}: others could use the token that "
            "is put "
            "there; write `--out FILE` instead of `> FILE`, or call `umask 077` before"
        )


@tenant.command("list")
@target_option
@json_option
def list_(target: str | None, as_json: bool) -> None:
    """List tenants: share of the bandwidth, bytes stored and moved, the master key that wraps their data key.

    \b
    Example:
      kvtier tenant list
      kvtier tenant list --json | jq '.tenants[].name'
    """
    with admin(resolve(target)) as stub:
        answer = stub.ListTenants(admin_pb2.ListTenantsRequest(), timeout=TIMEOUT_S)
    if as_json:
        print_json(plain(answer))
        return
    table = Table("tenant", "share", "nvme", "key", "moved", box=None, pad_edge=False)
    for row in answer.tenants:
        moved = ", ".join(f"{edge} {about_bytes(n)}" for edge, n in sorted(row.copied_bytes.items()))
        key = (row.master_key or "yes") if row.has_key else "no"
        table.add_row(row.name, f"{row.bandwidth_share:g}", about_bytes(row.nvme_bytes), key, moved)
    console().print(table)


@tenant.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@target_option
@json_option
def erase(name: str, yes: bool, target: str | None, as_json: bool) -> None:
    """Make everything unreadable that tenant NAME ever stored, by destroying its key. There is no way back.

    NAME is a tenant, or group:NAME, public: or common: for what several share. Its clients stay connected,
    and what they put afterwards is kept under another key. What was stored before encryption was switched on
    has no key: it is forgotten, and its bytes stay on the device until others are written over them.

    Of a fleet erase it on every host before you restart one of them: until then a host that erased it takes
    nothing of it from other hosts or an object store.

    \b
    Example:
      kvtier tenant erase acme
      kvtier tenant erase group:colours --yes
    """
    if not yes:
        click.confirm(f"Erase everything that {name} stored?", abort=True, err=True)
    with admin(resolve(target)) as stub:
        answer = stub.EraseTenant(admin_pb2.EraseTenantRequest(name=name), timeout=ERASE_TIMEOUT_S)
    if as_json:
        print_json(plain(answer))
        return
    key = "its key is destroyed" if answer.had_key else "there was no key of it"
    console().print(f"erased {name}: {key}, {answer.num_blocks:,} blocks forgotten")
