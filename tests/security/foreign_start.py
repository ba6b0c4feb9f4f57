"""A program that becomes another user and makes the checks of a start; prints the refusal.

    python -m tests.security.foreign_start POLICY UID

Everything is imported before: another user may not be able to read this checkout.
"""

import os
import sys
from pathlib import Path

from kvtier.appliance.compression import profiles
from kvtier.appliance.config import Settings
from kvtier.appliance.errors import StartError
from kvtier.appliance.preflight.table import require
from kvtier.appliance.security import tokens

assert profiles
assert tokens


def main() -> None:
    """Check a policy as another user."""
    settings, uid = Settings.load(Path(sys.argv[1]), {}), int(sys.argv[2])
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    try:
        require(settings)
    except StartError as refusal:
        print(refusal)


if __name__ == "__main__":
    main()
