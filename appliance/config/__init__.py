"""Settings of the daemon: reads, checks and documents the policy file, environment variables and `--set`.

Imported by the daemon, the command line, the chart and the benches: the names below, from this package.
Imports the planner's options and the registries of policies and codecs; none of these imports it.
"""

from .compression import CompressionRule, CompressionSettings
from .encryption import EncryptionSettings
from .fields import Switch
from .host_share import HostShare
from .live import LIVE, Change, changes, is_live, needing_restart
from .observe import Observe, is_private
from .origin import DEFAULT_SOURCE, Loaded, Origin, leaves
from .policy import Policy
from .reference import reference_table, schema_text, setting_keys
from .settings import Settings
from .sources import Problem, SettingsError, note_of_empty
from .tenants import COMMON, Access, Identities, Tenant, Tls, bandwidth_shares_of, check_name
from .tiers import HbmTier, NvmeTier, Tiers

__all__ = [
    "COMMON",
    "DEFAULT_SOURCE",
    "LIVE",
    "Access",
    "Change",
    "CompressionRule",
    "CompressionSettings",
    "EncryptionSettings",
    "HbmTier",
    "HostShare",
    "Identities",
    "Loaded",
    "NvmeTier",
    "Observe",
    "Origin",
    "Policy",
    "Problem",
    "Settings",
    "SettingsError",
    "Switch",
    "Tenant",
    "Tiers",
    "Tls",
    "bandwidth_shares_of",
    "changes",
    "check_name",
    "is_live",
    "is_private",
    "leaves",
    "needing_restart",
    "note_of_empty",
    "reference_table",
    "schema_text",
    "setting_keys",
]
