"""Lifecycle rules: what a store has to be told so that it forgets dead epochs by itself.

A bundle that is stored on the first day of an epoch is read until NUM_ALIVE epochs have passed, and a rule
knows no more than an object's age: so a rule of that many days never deletes what is read, and keeps what is
dead for an epoch at most.
"""

import json
import re
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from .keys import BUNDLES, NUM_ALIVE

_EXPIRY = re.compile(r'expiry-date="([^"]+)"')
_DAY_S: Final = 86_400
SLACK_DAYS: Final = 2  # a store rounds up to midnight, and may then take a day


def rule_days(epoch_days: int) -> int:
    """Return the age in days at which a rule deletes."""
    return NUM_ALIVE * epoch_days


def rules(scheme: str, prefix: str, epoch_days: int) -> str:
    """Return the rules of a store as JSON for its own tool; empty for a kind of store without any.
    `prefix`: of all keys, `container/prefix` on Azure; empty or without a `/` at its end."""
    under = f"{prefix}/{BUNDLES}" if prefix else BUNDLES
    days = rule_days(epoch_days)
    described: dict[str, Any]
    if scheme == "s3":
        expiring = {"Filter": {"Prefix": under}, "Expiration": {"Days": days}}
        described = {"Rules": [{"ID": f"kvtier {under}", "Status": "Enabled", **expiring}]}
    elif scheme == "gs":
        described = {
            "rule": [{"action": {"type": "Delete"}, "condition": {"age": days, "matchesPrefix": [under]}}]
        }
    elif scheme == "az":
        definition = {
            "actions": {"baseBlob": {"delete": {"daysAfterCreationGreaterThan": days}}},
            "filters": {"blobTypes": ["blockBlob"], "prefixMatch": [under]},
        }
        rule = {"enabled": True, "name": "kvtier", "type": "Lifecycle", "definition": definition}
        described = {"rules": [rule]}
    else:
        return ""
    return json.dumps(described, indent=1)


def expires_at(header: str) -> datetime | None:
    """Return when an object expires by `x-amz-expiration`; None when no rule covers it."""
    match = _EXPIRY.search(header)
    if match is None:
        return None
    try:
        return parsedate_to_datetime(match[1])
    except ValueError:
        return None


def judge_rule(header: str, stored_at_s: float, epoch_days: int) -> str:
    """Return what is wrong with the rule that covers an object; empty when nothing is.
    `header`: x-amz-expiration of the object, stored at `stored_at_s`."""
    at, wanted = expires_at(header), rule_days(epoch_days)
    if at is None:
        return f"no rule covers {BUNDLES}: dead epochs stay for ever; give the store the rules below"
    days = (at.timestamp() - stored_at_s) / _DAY_S
    if days < wanted - 0.01:
        return (
            f"a rule deletes after {days:.1f} days what is read for up to {wanted}; give it the rules below"
        )
    if days > wanted + SLACK_DAYS:
        return f"a rule keeps dead epochs for {days - wanted:.0f} more days; give it the rules below"
    return ""
