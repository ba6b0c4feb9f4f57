"""Which file system a path is on, as the kernel's list of mounts says."""

from pathlib import Path


def filesystem_of(path: Path, mountinfo: str) -> str:
    """Return the type of the file system `path` is on: that of the longest mount point around it."""
    best, kind = Path("/"), "unknown"
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split()
        if not dash or len(fields) < 5:
            continue
        mount = Path(fields[4].encode().decode("unicode_escape"))
        if (path == mount or mount in path.parents) and len(mount.parts) >= len(best.parts):
            best, kind = mount, after.split()[0]
    return kind
