"""The `encryption:` section of the settings: encryption of nvme and of an object store.

encryption:
  master_key: /etc/kvtier/master.key
"""

from .fields import Directory, Section

File = Directory  # an absolute path, too


class EncryptionSettings(Section):
    """Encryption of nvme and of an object store: AES-256-GCM, with a key for each tenant."""

    master_key: File | None = None
    """File with 64 hex digits, mode 0600, or 0440 in a Secret that Kubernetes mounts; set it where the device
    can be stolen or shared, or the object store is read by others; all hosts of a store need the same one. It
    wraps the tenants' keys in keys.json beside the segments, and those in the store. To rotate, put a
    new line on top and keep the old ones until a reload or start has wrapped all keys again. Empty: no
    encryption.
    Needs `pip install kvtier[encryption]`."""
