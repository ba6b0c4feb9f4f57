"""The `encryption:` section of the settings: whether what lies on the device can be read without a key.

encryption:
  master_key: /etc/kvtier/master.key
"""

from pydantic import BaseModel, ConfigDict

from .settings_fields import Directory

File = Directory  # an absolute path, too


class EncryptionSettings(BaseModel):
    """Records of nvme are encrypted with AES-256-GCM, under a key for each tenant."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    master_key: File | None = None
    """File with 64 hex digits that only the daemon's user can read (mode 0600). It wraps the tenants' keys,
    which are in keys.json beside the segments. Without it nothing is encrypted. Needs `pip install
    kvtier[encryption]`."""
