"""`kvtier tenant`: what an administrator does for a tenant that is no setting."""

import click

from ..settings_tenants import check_name
from ..tokens import hash_of, make_token
from .output import talk


@click.group()
def tenant() -> None:
    """Make credentials for tenants.

    \b
    Example:
      kvtier tenant token ci > ci.token 2>> /etc/kvtier/tokens
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
