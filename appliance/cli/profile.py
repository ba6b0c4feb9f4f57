"""`kvtier profile`: who vouches for a compression profile. Works on files; needs no daemon."""

from pathlib import Path

import click

from ...tiers.codecs.profile import ProfileError
from ...tiers.codecs.profile_file import read_profile
from ...tiers.codecs.profile_signature import is_signed_by, new_key, read_key, read_signature, sign_file
from .target import Failed

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def profile() -> None:
    """Sign compression profiles, and check who signed them.

    Where compression.trusted_keys names public keys, the daemon takes only profiles that one of them signed.

    \b
    Example:
      kvtier profile keygen ~/kvtier-profiles.pem
      kvtier profile sign profile.yaml --key ~/kvtier-profiles.pem
      kvtier profile verify profile.yaml
    """


@profile.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
def keygen(path: Path) -> None:
    """Write a new private key to PATH; print its public key, for compression.trusted_keys.

    \b
    Example:
      kvtier profile keygen ~/kvtier-profiles.pem
    """
    try:
        click.echo(new_key(path).hex())
    except FileExistsError:
        raise Failed(f"{path} is there already; name another file") from None
    except (ProfileError, OSError) as problem:
        raise Failed(str(problem)) from problem


@profile.command()
@click.argument("path", type=_FILE)
@click.option("--key", required=True, type=_FILE, help="A private key, as keygen writes it.")
def sign(path: Path, key: Path) -> None:
    """Sign the profile in PATH, in place of a former signature.

    \b
    Example:
      kvtier profile sign profile.yaml --key ~/kvtier-profiles.pem
    """
    try:
        signature = sign_file(path, read_key(key))
    except (ProfileError, OSError) as problem:
        raise Failed(str(problem)) from problem
    click.echo(f"signed by {signature.public_key.hex()}")


@profile.command()
@click.argument("path", type=_FILE)
@click.option("--key", "public_key", default="", help="The public key it has to be signed with, in hex.")
def verify(path: Path, public_key: str) -> None:
    """Say who signed the profile in PATH; exit 1 when nobody did, or somebody else.

    \b
    Example:
      kvtier profile verify profile.yaml
    """
    try:
        found, signature = read_profile(path), read_signature(path)
        if signature is None:
            raise Failed(f"{path} is not signed; kvtier profile sign")
        if not is_signed_by(found, signature):
            raise Failed(f"{path}: the signature is of another profile; sign it again")
    except (ProfileError, OSError) as problem:
        raise Failed(str(problem)) from problem
    if public_key and signature.public_key.hex() != public_key.lower():
        raise Failed(f"{path} is signed by {signature.public_key.hex()}, not {public_key}")
    click.echo(f"digest {found.digest.hex()}\nsigned by {signature.public_key.hex()}")
