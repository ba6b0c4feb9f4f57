"""`kvtier calibrate`: how much of a model's past can be thrown away before anyone notices, and where.

    budget.py       what may be lost, as people write it      allocation.py  bits to units, under a budget
    coding.py       one unit through the real coders          subject.py     the model: its past, its answers
    sensitivity.py  what each unit's bits cost, measured      search.py      allocate, check, adjust, repeat
    state.py        what was measured, kept across runs       report.py      the page with the pictures
    texts.py        the model's folder, rows of text          run.py         one calibration, begin to end

A *unit* is one head of K or V of one layer. Each is coded alone, at a few sizes, and the answers of the model
after that past are compared with its exact answers: the cost is the Kullback-Leibler divergence of the next
token's distribution, in nats a token. Costs of units nearly add up, so a greedy allocation is nearly best;
nearly is not good enough, so the result is checked on text of its own, and adjusted until it holds.

Proxies that need no forward pass (error of the values, attention scores, the layer's number) were rejected:
the first layer of one model is thirty times as sensitive as its others, and the last of another.
Only subject.py and what calls it need torch; the daemon never imports this folder.
"""
