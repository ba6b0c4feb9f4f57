"""Replay: what would this policy have done? The production planner on virtual tiers, driven by a trace.

    traces · readers · recording     what was asked, put and when: columns, and the files they come from
    virtual                          rooms of any size, and copies that take their time on a virtual clock
    untimed · timed                  the two shells around the planner: hit ratios fast, seconds in full
    setups · sweep                   which policies and sizes to run, side by side, in processes
    outcomes · report · chart        numbers, as a table, JSON and a picture

The third shell of the planner, beside the daemon and the simulator: it invents no decision of its own, so
what a policy scores here is what it does in production. A model of a cache written for replay would be ten
times faster and would drift from the truth with the first change to the planner.
"""
