"""Checks of places and of the daemon: sockets, ports, the cold store's directory, a daemon that runs."""

from collections.abc import Iterator

from ..config import Settings
from ..config.units import about_bytes
from .facts import Directory, Facts, Listen, RunningDaemon, Versions
from .verdicts import Check, fail, ok, warn

MEMORY_FILESYSTEMS = {"tmpfs", "ramfs"}
PATH, CAPACITY = "tiers.nvme.path", "tiers.nvme.capacity"
NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "fuse", "virtiofs", "lustre"}


def check_listens(facts: Facts, settings: Settings) -> Iterator[Check]:
    """Check that the daemon may listen at its addresses."""
    for listen in facts.listens:
        if listen.folder is not None:
            yield check_listen(listen, facts.daemon)


def check_listen(listen: Listen, daemon: RunningDaemon) -> Check:
    """Return whether a Unix socket can be made."""
    name = f"listen {listen.address}"
    if listen.kind == "live" and daemon.reachable:
        return ok(name, "the running daemon's")
    if listen.kind == "other":
        return fail(name, "something that is no socket is in the way", f"remove {listen.path}", "listen")
    if listen.kind == "live":
        fix = f"stop it (`kvtier drain --exit --target {listen.address}`), or change `listen`"
        return fail(name, f"another daemon listens at {listen.path}", fix, "listen")
    if listen.kind == "closed":
        fix = "change `listen`, or remove it as that user when no daemon runs"
        return fail(name, f"{listen.path} is another user's socket", fix, "listen")
    if not listen.is_writable:
        fix = f"install -d -m 0700 -o $USER {listen.folder}, or change `listen`"
        return fail(name, f"{listen.folder} is not writable", fix, "listen")
    if listen.is_shared_folder:
        return warn(
            name,
            f"others may write to {listen.folder}",
            f"chmod 0700 {listen.folder}, or listen in a folder of the daemon's own",
            "listen",
        )
    return ok(name, "a dead socket is replaced" if listen.kind else "may be created")


def check_http(facts: Facts, settings: Settings) -> Iterator[Check]:
    """Check that the port of metrics and page is free."""
    address = settings.observe.http_address
    if address is None or facts.daemon.reachable:
        return
    name, where = "http", f"{address.host}:{address.port}"
    if facts.is_http_free:
        yield ok(name, f"{where} is free")
        return
    fix = "set observe.http to another port, or off"
    if address.is_wanted:
        yield fail(name, f"{where} cannot be listened at", fix, "observe.http")
    else:
        yield warn(name, f"{where} cannot be listened at: no metrics and page", fix)


def check_cold_store(facts: Facts, settings: Settings) -> Iterator[Check]:
    """Check that the cold store's directory can be used, and is used by one daemon only."""
    if facts.directory is not None:
        yield from check_directory(facts.directory, settings, facts.daemon.reachable)


def check_directory(directory: Directory, settings: Settings, running: bool) -> list[Check]:
    """Check that the cold store fits into its directory."""
    nvme = settings.tiers.nvme
    assert nvme is not None
    name = f"nvme {directory.path}"
    if directory.is_something_else:
        return [fail(name, f"{directory.path} is no directory", "set tiers.nvme.path to a directory", PATH)]
    if not directory.is_writable:
        fix = "chown it to the daemon's user, or change tiers.nvme.path"
        return [fail(name, f"{directory.path} is not writable", fix, PATH)]
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
    wanted = about_bytes(nvme.num_segments * nvme.segment_bytes)
    detail = f"{wanted} wanted, {about_bytes(room)} there"
    if nvme.num_segments * nvme.segment_bytes > room:
        checks.append(
            fail(
                "nvme space",
                f"{directory.path}: {detail}",
                "lower tiers.nvme.capacity, or make room",
                CAPACITY,
            )
        )
    else:
        checks.append(ok("nvme space", detail))
    if directory.lock_holder and not running:
        checks.append(
            fail(
                "nvme lock",
                f"{directory.path} belongs to {directory.lock_holder}",
                "stop that process, or set tiers.nvme.path to another directory",
                PATH,
            )
        )
    else:
        checks.append(
            ok("nvme lock", f"held by {directory.lock_holder}" if directory.lock_holder else "free")
        )
    return checks


# --------------------------------------------------------------------------------------------- daemon


def check_running(facts: Facts, settings: Settings) -> list[Check]:
    """Check the running daemon, if there is one."""
    return check_daemon(facts.daemon, facts.versions)


def check_daemon(daemon: RunningDaemon, versions: Versions) -> list[Check]:
    """Check that a running daemon is of this version, passes its audits, and is as fast as it should be."""
    if not daemon.reachable:
        verdict = fail if daemon.was_named else warn
        detail, _, fix = daemon.error.partition(" Fix: ")  # a denied socket is no reason to start another one
        return [verdict("daemon", detail, fix or "start it with `kvtier serve`, or name it with --target")]
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
