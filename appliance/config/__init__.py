"""Settings of the daemon: reads, checks and documents the policy file, environment variables and `--set`.

Imported by the daemon, the command line, the chart and the benches: the names below, from this package.
Imports the planner's options and the registries of policies and codecs; none of these imports it. Names are
imported at first use: `kvtier status` reads sizes (units.py), and needs neither pydantic nor the codecs.
"""

from typing import TYPE_CHECKING

from ...lazy import on_demand

if TYPE_CHECKING:
    from .compression import CompressionRule, CompressionSettings
    from .encryption import EncryptionSettings
    from .fields import Switch
    from .host_share import HostShare
    from .live import LIVE, Change, changes, is_live, needing_restart
    from .observe import Observe, is_private
    from .origin import DEFAULT_SOURCE, Loaded, Origin, leaves
    from .policy import Policy
    from .reference import schema_text
    from .settings import Settings
    from .sources import Problem, SettingsError, note_of_empty
    from .tenants import (
        COMMON,
        Access,
        Tenant,
        Tls,
        bandwidth_shares_of,
        check_name,
        domain_named,
        tokens_among,
    )
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
    "domain_named",
    "is_live",
    "is_private",
    "leaves",
    "needing_restart",
    "note_of_empty",
    "schema_text",
    "tokens_among",
]

__getattr__ = on_demand(
    __name__,
    {
        ".compression": "CompressionRule CompressionSettings",
        ".encryption": "EncryptionSettings",
        ".fields": "Switch",
        ".host_share": "HostShare",
        ".live": "LIVE Change changes is_live needing_restart",
        ".observe": "Observe is_private",
        ".origin": "DEFAULT_SOURCE Loaded Origin leaves",
        ".policy": "Policy",
        ".reference": "schema_text",
        ".settings": "Settings",
        ".sources": "Problem SettingsError note_of_empty",
        ".tenants": "COMMON Access Tenant Tls bandwidth_shares_of check_name domain_named tokens_among",
        ".tiers": "HbmTier NvmeTier Tiers",
    },
)
