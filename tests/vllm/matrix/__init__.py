"""`make test-matrix`: what each version of vLLM does with kvtier, run in that version's environment.

rows.py      features, and the tests that show them
record.py    docs/data/compatibility.json: how each cell ended, when, on which commit
page.py      docs/compatibility.md, from that
__main__.py  runs what is not known yet
"""
