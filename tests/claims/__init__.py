"""The ledger of claims: docs/data/claims.json, the page made from it, and the runs that check it.

ledger.py reads the file and says which figures a page cites, page.py makes docs/claims.md, rerun.py runs the
commands of claims and marks what drifted.
"""
