"""Preflight: one table of checks of settings and host (`table.py`), used by five callers.

    kvtier serve            refuses to start on a `fail` (SETTINGS, FILES, HOST)
    reload, policy apply    keeps the policy in force on a `fail` (SETTINGS, FILES)
    kvtier restart          keeps the daemon on a `fail` (SETTINGS, FILES, HOST)
    kvtier policy validate  prints what is not ok (SETTINGS, and FILES unless --no-files)
    kvtier doctor           prints every line (all of them, and what only a person reads)

To add a check: write a function from (Facts, Settings) to Checks, and add it to CHECKS in `table.py`. What it
needs to know about the host is a lazy attribute of Facts (`facts.py`), computed at its first use.
"""

HELD_BYTES = "_KVTIER_HELD_BYTES"  # variable that a daemon sets for the `serve --check` of its successor
