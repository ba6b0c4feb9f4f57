"""The profiles a daemon knows: the files of one directory, read at the start and with every reload.

Only the administrator writes there, as to the policy file itself, so nothing is signed; a digest over all
that a decoder needs finds damage. A damaged file keeps the daemon from starting: a namespace that names it
would be refused later, without a visible reason. A reload is refused for one.
Taking a profile away makes its records unreadable until it is back; they are misses meanwhile.
"""

from collections.abc import Mapping
from pathlib import Path

from ...tiers.block import NamespaceIdentity
from ...tiers.codecs.lossy.profile import Profile, ProfileError
from ...tiers.codecs.lossy.profile_file import SUFFIX, read_profile
from ..config import CompressionSettings
from ..errors import StartError, error

Profiles = Mapping[bytes, Profile]  # by digest


def read_profiles(settings: CompressionSettings) -> Profiles:
    """Return the profiles of the directory in the settings, none without one.

    Raises StartError, naming what to change.
    """
    found: dict[bytes, Profile] = {}
    for path in _files(settings.profiles):
        try:
            profile = read_profile(path)
        except (ProfileError, OSError) as problem:
            raise StartError(f"compression.profiles: {problem}; repair the file or take it away") from problem
        found[profile.digest] = profile
    return found


def check_profile(identity: NamespaceIdentity, profiles: Profiles) -> None:
    """Refuse a namespace that names a profile which is not there, or not for it."""
    digest = identity.profile_digest
    if not digest:
        return
    profile = profiles.get(digest)
    if profile is None:
        raise error(
            "UNKNOWN_PROFILE",
            f"there is no profile {digest.hex()} here; put its file into the directory compression.profiles "
            "and reload, or register the namespace without it",
        )
    if why := profile.why_not(identity):
        raise error(
            "UNKNOWN_PROFILE",
            f"profile {digest.hex()[:16]} is not for this namespace: {why}; calibrate one for it, or "
            "register without",
        )


def _files(directory: Path | None) -> list[Path]:
    if directory is None:
        return []
    try:
        return sorted(path for path in directory.iterdir() if path.suffix == SUFFIX)
    except OSError as problem:
        raise StartError(
            f"compression.profiles: {directory} cannot be read ({problem.strerror}); create it, or leave the "
            "setting out"
        ) from problem
