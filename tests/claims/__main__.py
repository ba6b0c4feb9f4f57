"""`python -m tests.claims [--claim NAME] [--minutes 60]`: run claims again and write docs/claims.md.

Without names: those that were not run at this commit, the ones that were run longest ago first, as many as
fit. Each run is written down when it ends, so a call that was interrupted, or that had little time, is
continued by the next one. The exit status is 1 when a figure drifted, a command failed or a named claim did
not run. TRACES names the folder of the public traces that replays read.
"""

import argparse
import sys

from . import ledger, page, rerun


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.claims", description=__doc__)
    claims = ledger.load()
    names = [claim.name for claim in claims if claim.minutes]
    parser.add_argument("--claim", choices=names, action="append", help="only this one; may be repeated")
    parser.add_argument("--minutes", type=float, default=60.0, help="as many claims as fit")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    arguments = parser.parse_args()
    if arguments.claim:
        chosen = [claim for claim in claims if claim.name in arguments.claim]
    else:
        chosen = [] if arguments.page else rerun.left_to_run(claims, rerun.commit_here())
    before = {claim.name: len(claim.runs) for claim in claims}
    claims, not_run, failed = rerun.run_all(claims, chosen, arguments.minutes, write)
    write(claims)
    ran = [claim for claim in claims if len(claim.runs) > before[claim.name]]
    drifted = [claim for claim in ran if claim.drifted()]
    if chosen:
        print(f"{len(ran)} run, {len(drifted)} of them drifted; {len(failed)} failed, {len(not_run)} not run")
    return 1 if drifted or failed or (not_run and arguments.claim) else 0


def write(claims: list[ledger.Claim]) -> None:
    """Write the ledger and its page."""
    ledger.save(claims)
    for path, content in page.claims_page():
        path.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
