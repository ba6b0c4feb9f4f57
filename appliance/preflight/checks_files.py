"""Checks of files that the settings name: certificates, tokens, master keys, profiles.

The files are those of this machine: what is missing here may be there where the daemon runs, and each line
says so with the path. `kvtier policy validate --no-files` leaves these checks out.
"""

import stat
import time
from collections.abc import Iterator

from ..config import Settings, tokens_among
from ..config.units import format_duration
from ..errors import StartError
from .certificates import TlsFiles
from .facts import Facts, MasterKeyFile
from .verdicts import Check, fail, ok, warn

SOON_S = 14 * 86_400.0  # before a certificate ends


def check_tls(facts: Facts, settings: Settings) -> Iterator[Check]:
    """Check that the certificates can be read, fit together and are valid today."""
    files = facts.tls
    if files is None:
        return
    for key, why in files.unusable.items():
        yield fail("tls", why, f"mend the file, or access.tls.{key}", f"access.tls.{key}")
    if files.invalid:
        yield warn(
            "tls",
            f"clients refuse the certificate: {files.invalid}",
            "renew it; a new file needs no restart",
            "access.tls.certificate",
        )
    else:
        yield from _soon("access.tls.certificate", files.not_after, files)
    if files.is_key_public:
        fix = f"chmod o= {settings.access.tls.key}" if settings.access.tls else ""
        yield warn("tls", "every user of this machine can read the key", fix, "access.tls.key")
    if files.has_client_ca and "client_ca" not in files.unusable:
        if not files.num_authorities:
            what = "holds no certificate of an authority, so no client's is accepted"
            yield warn("tls", what, "name the authority that signs the clients", "access.tls.client_ca")
        yield from _soon("access.tls.client_ca", files.authorities_not_after, files)
    if files.not_after is not None and not files.unusable and not files.invalid:
        left = format_duration(round((files.not_after - files.read_at) / 3600) * 3600.0)
        yield ok("tls", f"certificate, key and authorities fit; valid for {left}")


def _soon(setting: str, not_after: float | None, files: TlsFiles) -> Iterator[Check]:
    """Return a warning for a certificate that ends soon, or has ended."""
    if not_after is None or not_after > files.read_at + SOON_S:
        return
    day = time.strftime("%Y-%m-%d", time.gmtime(not_after))
    said = "ended" if not_after <= files.read_at else "ends"
    yield warn("tls", f"{said} on {day}", "renew it; a new file needs no restart", setting)


def check_tokens(facts: Facts, settings: Settings) -> Iterator[Check]:
    """Check that the token file can be read, has a line for every name, and only its owner writes it."""
    from ..security.tokens import read_tokens

    path, setting = settings.access.tokens, "access.tokens"
    if path is None:
        return
    try:
        known, mode = read_tokens(path), path.stat().st_mode
    except OSError as problem:
        fix = "`kvtier tenant token NAME` makes its lines"
        yield fail("tokens", f"cannot read {path} on this machine: {problem.strerror}", fix, setting)
        return
    except ValueError as problem:
        yield fail("tokens", f"{path}: {problem}", "mend that line", setting)
        return
    for where, name in _named_tokens(settings):
        if name not in known:
            yield warn(
                "tokens",
                f"token {name} is named, and {path} has no line for it: no caller can use it",
                f"add the line that `kvtier tenant token {name}` prints",
                where,
            )
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        yield warn("tokens", f"others can add tokens to {path}", f"chmod go-w {path}", setting)
    if mode & stat.S_IROTH:
        what = f"every user of this machine can read the names and hashes in {path}"
        yield warn("tokens", what, f"chmod o= {path}", setting)
    yield ok("tokens", f"{len(known)} in {path}")


def _named_tokens(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield (setting, name) of every token that the settings name."""
    named = {
        "access.admin": tokens_among(settings.access.admin),
        "observe.readers": sorted(settings.observe.reader_tokens),
        **{f"tenants.{name}.members": tokens_among(one.members) for name, one in settings.tenants.items()},
    }
    return ((setting, token) for setting, tokens in named.items() for token in tokens)


def judge_master_keys(file: MasterKeyFile) -> Check:
    """Return what a file of master keys comes to."""
    name, setting = "master keys", "encryption.master_key"
    if file.error:
        what, _, fix = file.error.removeprefix(f"{setting}: ").partition("; ")
        return fail(name, what, fix or "mend the file", setting)
    if file.is_unreadable:
        fix = "run doctor as the daemon's user or root; the store's owner must be able to read it"
        return warn(name, f"{file.path} cannot be read by this user", fix, setting)
    current, *older = file.ids
    missing = sorted(file.wraps.keys() - {"", *file.ids})
    if missing:
        num_lost = sum(file.wraps[one] for one in missing)
        detail = f"{', '.join(missing)} wraps {num_lost} tenants' keys and is not in {file.path}"
        fix = "put its line back below the others, or the daemon will not start"
        return fail(name, detail, fix, setting)
    detail = f"{current} in force, wraps {file.wraps.get(current, 0)}"
    needed = [one for one in older if file.wraps.get(one)]
    unnamed = file.wraps.get("", 0)
    if needed or unnamed:
        words = [f"{one} wraps {file.wraps[one]}" for one in needed]
        words += [f"{unnamed} wrapped by an older version"] if unnamed else []
        fix = "SIGHUP (`systemctl reload kvtier`) or a restart wraps them anew; keep every line until then"
        return warn(name, f"{detail}; {', '.join(words)}", fix, setting)
    if older:
        fix = "remove their lines when no other node or backup needs them"
        return warn(name, f"{detail}; not needed by this store any more: {', '.join(older)}", fix, setting)
    return ok(name, detail)


def check_fleet_keys(facts: Facts, settings: Settings) -> Iterator[Check]:
    """Check that the master keys open what an object store holds."""
    trial, setting = facts.fleet_keys, "encryption.master_key"
    if trial.problem:
        what, _, fix = trial.problem.rstrip(")").partition("; ")
        yield fail("tenant keys", f"{settings.object.url}: {what}", fix, setting)
    elif trial.num_foreign:
        what = f"{trial.num_foreign} tenant keys are of another master key: their tenants are not served"
        fix = "put its line below the others, or delete what is not of this fleet (the log names it)"
        yield warn("tenant keys", f"{settings.object.url}: {what}", fix, setting)


def check_compression_files(facts: Facts, settings: Settings) -> Iterator[Check]:
    """Check that profiles can be read."""
    from ..compression.profiles import read_profiles  # late: the codecs take half a second

    if settings.compression.profiles is None:
        return
    try:
        read_profiles(settings.compression)
    except StartError as problem:
        setting, _, rest = str(problem).partition(": ")
        what, _, fix = rest.partition("; ")
        yield fail("profiles", what, fix, setting)
    else:
        yield ok("profiles", str(settings.compression.profiles))
