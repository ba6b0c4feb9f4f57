"""The trace load at a small size: the real daemon hits exactly what the replay of its requests says."""

import pytest

from bench.trace_load import BLOCKS_PER_EXTENT, generate, play, replayed, small


@pytest.mark.parametrize("policy", ["lru"])
def test_daemon_and_replay_hit_the_same_blocks(policy: str) -> None:
    trace = small(generate(seed=3, num_requests=60))
    played = play(trace, policy, 1, seconds=0)
    outcome = replayed(trace, played, policy, BLOCKS_PER_EXTENT)
    assert (played.num_wrong, played.num_refused) == (0, 0)
    assert outcome.counters["evicted_dram"] > BLOCKS_PER_EXTENT  # the tier was full, more than once
    assert 0 < sum(played.num_hits) == sum(outcome.block_hits.values())
