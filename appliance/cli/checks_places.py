"""The doctor's checks of places and of the daemon: sockets, the cold store's directory, who answers there.

Pure, as in checks.py.
"""

from ..settings import Settings
from ..units import about_bytes
from .facts import Daemon, Directory, Listen, MasterKeyFile, Versions
from .verdicts import Check, fail, ok, warn

MEMORY_FILESYSTEMS = {"tmpfs", "ramfs"}
NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "fuse", "virtiofs", "lustre"}


def check_listen(listen: Listen, daemon: Daemon) -> Check:
    """The daemon may listen where it is told to."""
    name = f"listen {listen.address}"
    if listen.folder is None:
        if listen.is_loopback:
            return ok(name, "loopback")
        return warn(
            name,
            "anybody who reaches this port can read and drop blocks",
            "listen on unix:///... or firewall it",
        )
    if listen.kind == "other":
        return fail(name, "something that is no socket is in the way", f"remove {listen.path}")
    if not listen.is_writable:
        return fail(name, f"{listen.folder} is not writable", f"install -d -m 0700 -o $USER {listen.folder}")
    if listen.is_shared_folder:
        return warn(
            name,
            f"others may write to {listen.folder}",
            f"chmod 0700 {listen.folder}, or listen in a folder of the daemon's own",
        )
    if listen.kind == "socket":
        is_it = daemon.reachable and daemon.target == listen.address
        return ok(name, "the running daemon's" if is_it else "a socket is there; a dead one is replaced")
    return ok(name, "may be created")


def check_directory(directory: Directory, settings: Settings, running: bool) -> list[Check]:
    """The cold store's directory can hold what it is to hold."""
    nvme = settings.tiers.nvme
    assert nvme is not None
    name = f"nvme {directory.path}"
    if directory.is_something_else:
        return [fail(name, "is no directory", "set tiers.nvme.path to a directory")]
    if not directory.is_writable:
        return [fail(name, "is not writable", "chown it to the daemon's user, or change tiers.nvme.path")]
    checks = [ok(name, f"{directory.filesystem}, {'exists' if directory.exists else 'will be created'}")]
    if directory.filesystem in MEMORY_FILESYSTEMS:
        checks[0] = warn(
            name, f"{directory.filesystem} is memory, not a disk", "set tiers.nvme.path to an NVMe disk"
        )
    elif directory.filesystem.split(".")[0] in NETWORK_FILESYSTEMS:
        checks[0] = warn(
            name, f"{directory.filesystem} is a network away", "set tiers.nvme.path to a local disk"
        )
    elif directory.filesystem in ("overlay", "aufs"):
        checks[0] = warn(name, "is in the container's own layer", "mount a volume at tiers.nvme.path")
    if directory.direct_error:
        checks.append(
            warn(
                "nvme direct I/O",
                f"{directory.direct_error}; the slower aiofiles back end would serve it",
                "use ext4 or xfs",
            )
        )
    else:
        checks.append(ok("nvme direct I/O", "accepted"))
    room = directory.free_bytes + directory.own_bytes
    detail = f"{about_bytes(nvme.num_segments * nvme.segment_bytes)} wanted, {about_bytes(room)} there"
    if nvme.num_segments * nvme.segment_bytes > room:
        checks.append(fail("nvme space", detail, "lower tiers.nvme.capacity, or make room"))
    else:
        checks.append(ok("nvme space", detail))
    if directory.lock_holder and not running:
        checks.append(
            fail(
                "nvme lock",
                f"held by {directory.lock_holder}, and no daemon answers",
                "stop that process, or set tiers.nvme.path to another directory",
            )
        )
    else:
        checks.append(
            ok("nvme lock", f"held by {directory.lock_holder}" if directory.lock_holder else "free")
        )
    return checks


def check_master_keys(file: MasterKeyFile) -> Check:
    """The file of master keys opens what is stored; says which of its lines are not needed any more."""
    name = "master keys"
    if file.error:
        what, _, fix = file.error.partition("; ")
        return fail(name, what, fix or "mend the file")
    if file.is_unreadable:
        fix = "run doctor as the daemon's user or root; the store's owner must be able to read it"
        return warn(name, f"{file.path} cannot be read by this user", fix)
    current, *older = file.ids
    missing = sorted(file.wraps.keys() - {"", *file.ids})
    if missing:
        num_lost = sum(file.wraps[one] for one in missing)
        detail = f"{', '.join(missing)} wraps {num_lost} tenants' keys and is not in {file.path}"
        return fail(name, detail, "put its line back below the others, or the daemon will not start")
    detail = f"{current} in force, wraps {file.wraps.get(current, 0)}"
    needed = [one for one in older if file.wraps.get(one)]
    unnamed = file.wraps.get("", 0)
    if needed or unnamed:
        words = [f"{one} wraps {file.wraps[one]}" for one in needed]
        words += [f"{unnamed} wrapped by an older version"] if unnamed else []
        fix = "SIGHUP (`systemctl reload kvtier`) or a restart wraps them anew; keep every line until then"
        return warn(name, f"{detail}; {', '.join(words)}", fix)
    if older:
        fix = "remove their lines when no other node or backup needs them"
        return warn(name, f"{detail}; not needed by this store any more: {', '.join(older)}", fix)
    return ok(name, detail)


# --------------------------------------------------------------------------------------------- daemon


def check_daemon(daemon: Daemon, versions: Versions) -> list[Check]:
    """A running daemon is of this version, sound, and as fast as its settings promise."""
    if not daemon.reachable:
        verdict = fail if daemon.was_named else warn
        return [verdict("daemon", daemon.error, "start it with `kvtier serve`, or name it with --target")]
    checks = [ok("daemon", f"answers at {daemon.target}")]
    if daemon.version != versions.kvtier:
        checks.append(
            warn(
                "daemon version",
                f"daemon {daemon.version}, this program {versions.kvtier}",
                "install the same version on both sides",
            )
        )
    else:
        checks.append(ok("daemon version", daemon.version))
    if daemon.draining:
        checks.append(warn("daemon state", "is draining: it takes nothing new", "wait for its successor"))
    if daemon.problems:
        shown = "; ".join(daemon.problems[:3]) + (
            f"; {len(daemon.problems) - 3} more" if daemon.problems[3:] else ""
        )
        checks.append(fail("daemon integrity", shown, "restart the daemon and file a bug with this text"))
    else:
        checks.append(ok("daemon integrity", "every audit is clean"))
    backend = daemon.backends.get("nvme")
    if backend is not None:
        if "direct" in backend.lower():
            checks.append(ok("daemon nvme", backend))
        else:
            checks.append(
                warn("daemon nvme", f"{backend}: no direct I/O", "put tiers.nvme.path on ext4 or xfs")
            )
    return checks
