"""The `encryption:` section of the settings: whether what lies on the device can be read without a key.

encryption:
  master_key: /etc/kvtier/master.key
"""

from .fields import Directory, Section

File = Directory  # an absolute path, too


class EncryptionSettings(Section):
    """Records of nvme are encrypted with AES-256-GCM, under a key for each tenant."""

    master_key: File | None = None
    """File with 64 hex digits that only the daemon's user can read (mode 0600). It wraps the tenants' keys,
    which are in keys.json beside the segments. To change it put a new line on top: the first one is in force,
    the others are needed until everything is wrapped anew, which a reload or a start does. Without it nothing
    is encrypted. Needs `pip install kvtier[encryption]`."""
    group_may_read: bool = False
    """Take a file that its group can read (mode 0440), too, as Kubernetes mounts a Secret for a user that is
    not root. On a machine whose other users are in that group: leave it false."""
