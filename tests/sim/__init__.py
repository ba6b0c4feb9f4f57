"""The simulator: the production planner over virtual tiers, a virtual clock and hostile everything else.

    python -m tests.sim --seeds 2000            both modes, swarm configurations
    python -m tests.sim --trace 4711            one line per event of one seed
    python -m tests.sim --mutants               which check kills which planted defect

A seed is a whole world: it draws its own configuration (a handful of slots, tiny queues, one or two
isolation domains), its clients, its faults and the order of everything. Contents are *tokens*: a number
per fragment that a client ever had in its staging extent, remembered by the oracle's `Contents` with the
key it belongs to. Tokens travel through virtual slots and records exactly as bytes would, read and written
when a copy executes, not when it was asked for; so a reader who gets another block's token has got wrong
bytes.

Every seed runs in two modes. In the normal one cold reads verify identity and checksum as the real engine
does, and the media rot, misdirect and lie; a mismatch that no injected fault explains is a violation all the
same. In the other (`verify=False`) nothing is verified and the media are honest, because verification hides
protocol bugs: it turns wrong bytes into misses.

Read world.py (time, trace), memory.py and cold.py (tiers), daemon.py (executes instructions), clients.py
(what people do), oracle.py (what must hold), run.py (one seed from start to quiescence).
"""
