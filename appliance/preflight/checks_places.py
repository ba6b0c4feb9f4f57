"""Checks of places and of the daemon: sockets, ports, the cold store's directory, a daemon that runs."""

import errno
import os
from collections.abc import Iterator

from ..config import Settings
from ..config.units import about_bytes
from .facts import Directory, Facts, Listen, RunningDaemon, Versions
from .verdicts import Check, fail, ok, warn

MEMORY_FILESYSTEMS = {"tmpfs", "ramfs"}
PATH, CAPACITY = "tiers.nvme.path", "tiers.nvme.capacity"
NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "fuse", "virtiofs", "lustre"}
NO_DIRECT_IO = {errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR}  # of a file system that has none
WRITE_FIXES = {
    errno.EROFS: "mount it for writing; `dmesg` says whether the kernel ended that after an error",
    errno.ENOSPC: "make room: the manifest grows beside the segments",
    errno.EDQUOT: "raise the quota of the daemon's user: the manifest grows beside the segments",
}


def check_listen(listen: Listen, daemon: RunningDaemon) -> Check:
    """Return whether a Unix socket can be made."""
    name = f"listen {listen.address}"
    if listen.kind == "live" and daemon.is_there:
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
    if address is None or facts.daemon.is_there:
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


def check_directory(directory: Directory | None, settings: Settings, running: bool) -> Iterator[Check]:
    """Check that the cold store fits into its directory, where there is one."""
    nvme = settings.tiers.nvme
    if directory is None or nvme is None:
        return
    name, path = f"nvme {directory.path}", directory.path
    if directory.is_something_else:
        yield fail(name, f"{path} is no directory", f"set {PATH} to a directory", PATH)
        return
    if directory.write_errno not in (0, *NO_DIRECT_IO):
        fix = WRITE_FIXES.get(directory.write_errno, "look at the device, and what `dmesg` says of it")
        yield fail(name, f"{path} cannot be written ({os.strerror(directory.write_errno)})", fix, PATH)
        return
    if not directory.is_writable:
        yield fail(name, f"{path} is not writable", f"chown it to the daemon's user, or change {PATH}", PATH)
        return
    if directory.filesystem in MEMORY_FILESYSTEMS:
        yield warn(name, f"{directory.filesystem} is memory, not a disk", f"set {PATH} to an NVMe disk")
    elif directory.filesystem.split(".")[0] in NETWORK_FILESYSTEMS:
        yield warn(name, f"{directory.filesystem} is a network away", f"set {PATH} to a local disk")
    elif directory.filesystem in ("overlay", "aufs"):
        yield warn(name, "is in the container's own layer", f"mount a volume at {PATH}")
    else:
        yield ok(name, f"{directory.filesystem}, {'exists' if directory.exists else 'will be created'}")
    if directory.write_errno:
        reason = os.strerror(directory.write_errno)
        what = f"direct I/O is refused ({reason}); the slower aiofiles back end would serve it"
        yield warn("nvme direct I/O", what, "use ext4 or xfs")
    else:
        yield ok("nvme direct I/O", "accepted")
    room, wanted = directory.free_bytes + directory.own_bytes, nvme.num_segments * nvme.segment_bytes
    detail = f"{about_bytes(wanted)} wanted, {about_bytes(room)} there"
    if wanted > room:
        yield fail("nvme space", f"{path}: {detail}", f"lower {CAPACITY}, or make room", CAPACITY)
    else:
        yield ok("nvme space", detail)
    holder = directory.lock_holder
    if holder and not running:
        fix = f"stop that process, or set {PATH} to another directory"
        yield fail("nvme lock", f"{path} belongs to {holder}", fix, PATH)
    else:
        yield ok("nvme lock", f"held by {holder}" if holder else "free")


def check_daemon(daemon: RunningDaemon, versions: Versions) -> Iterator[Check]:
    """Check that a running daemon is of this version, passes its audits, and is as fast as it should be."""
    if not daemon.reachable:
        verdict = fail if daemon.was_named or daemon.is_silent else warn
        detail, _, fix = daemon.error.partition(" Fix: ")  # a denied socket is no reason to start another one
        if daemon.is_silent:
            fix = "is its process stopped (`ps -o stat`)? If not, end it: its supervisor starts another"
        yield verdict("daemon", detail, fix or "start it with `kvtier serve`, or name it with --target")
        return
    yield ok("daemon", f"answers at {daemon.target}")
    if daemon.version != versions.kvtier:
        what = f"daemon {daemon.version}, this program {versions.kvtier}"
        yield warn("daemon version", what, "install the same version on both sides")
    else:
        yield ok("daemon version", daemon.version)
    if daemon.draining:
        yield warn("daemon state", "is draining: it takes nothing new", "wait for its successor")
    if daemon.policy_problem:
        what = f"runs with an earlier policy, the file is refused: {daemon.policy_problem}"
        fix = "mend it, or `kvtier restart` where it needs one; `kvtier policy apply --dry-run` tries it"
        yield warn("daemon policy", what, fix)
    for tier in daemon.offline:
        what = f"tier {tier} stopped working, and the daemon goes on without it"
        yield fail(
            f"daemon {tier}", what, f"its log has why, behind `tier {tier} is lost`; restart the daemon"
        )
    if daemon.source_problem:
        fix = "correct what it says; it is used again without a restart"
        yield warn("daemon object store", f"is not asked, or takes nothing: {daemon.source_problem}", fix)
    if daemon.problems:
        more = f"; {len(daemon.problems) - 3} more" if daemon.problems[3:] else ""
        what = "; ".join(daemon.problems[:3]) + more
        yield fail("daemon integrity", what, "restart the daemon and file a bug with this text")
    else:
        yield ok("daemon integrity", "every audit is clean")
    backend = daemon.backends.get("nvme") if "nvme" not in daemon.offline else None
    if backend is not None and "direct" in backend.lower():
        yield ok("daemon nvme", backend)
    elif backend is not None:
        yield warn("daemon nvme", f"{backend}: no direct I/O", f"put {PATH} on ext4 or xfs")
