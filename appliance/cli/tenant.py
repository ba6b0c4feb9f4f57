"""`kvtier tenant`: what an administrator does for a tenant that is no setting."""

import click
from rich.table import Table

from ...v1 import admin_pb2
from ..settings_tenants import check_name
from ..tokens import hash_of, make_token
from ..units import about_bytes
from .output import console, plain, print_json, talk
from .target import TIMEOUT_S, admin, json_option, resolve, target_option

ERASE_TIMEOUT_S = 300.0  # a tenant may have a million blocks


@click.group()
def tenant() -> None:
    """Make credentials for tenants, see what they take, erase them.

    \b
    Example:
      kvtier tenant token ci > ci.token 2>> /etc/kvtier/tokens
      kvtier tenant list
      kvtier tenant erase acme
    """


@tenant.command()
@click.argument("name")
def token(name: str) -> None:
    """Make a bearer token called NAME: the token to stdout, what the daemon keeps to stderr.

    \b
    Example:
      kvtier tenant token ci > ci.token 2>> /etc/kvtier/tokens
    """
    try:
        check_name(name)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    made = make_token()
    talk().print(f"{name} {hash_of(made)}", highlight=False, soft_wrap=True)
    click.echo(made)


@tenant.command("list")
@target_option
@json_option
def list_(target: str | None, as_json: bool) -> None:
    """Show who there is: share of the bandwidth, what is stored and moved, which master key wraps its own.

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
    and what they put afterwards is kept under another key.

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
