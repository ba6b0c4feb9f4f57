"""Segments of intN: many of them in one call, and in vectors, are what one by one makes of them."""

import numpy as np
import pytest

from kvtier.tiers.codecs.base import DoesNotFit, Shape
from kvtier.tiers.codecs.lossy.profile import Axis, Coder, Rule
from kvtier.tiers.codecs.lossy.profiled import Profiled, coder_of
from tests.contracts.kv_values import values_like_kv
from tests.contracts.test_lossy_codecs import adversaries, floats_of, profile_of, profiled


def test_segments_of_int_coded_by_one_call_are_those_coded_one_by_one() -> None:
    """Whatever their bits, axes, heads and groups; an exact one in the middle ends a call."""
    shape = Shape(4, 2, 12, 3, 32, "bfloat16")
    rules = []
    for unit in range(8):
        heads = [(0, 3)] if unit % 3 else [(0, 1), (1, 3)]
        for first, end in heads:
            axis: Axis = "token" if unit % 2 else "channel"
            coder: Coder = "exact" if unit == 4 else "int"
            bits = 0 if unit == 4 else 2 + (unit + first) % 7
            rules.append(Rule(unit // 2, unit % 2, first, end, coder, bits, axis, 3 + unit % 2))
    profile = profile_of(shape, tuple(rules))
    codec = Profiled(profile)
    assert len(codec._layout(shape).runs) == 3
    payload = values_like_kv(shape, seed=12)
    stored = np.full(codec.stored_bound(shape), 0xA5, np.uint8)
    codec.encode(shape, payload.data, stored.data)
    units = payload.view(np.uint16).reshape(8, 12, 3, 32)
    units.flags.writeable = False
    decoded = np.empty(shape.raw_bytes, np.uint8)
    codec.decode(shape, stored.data, decoded.data)
    expected, alone, end = np.zeros_like(stored), np.zeros_like(units), 0
    for rule in rules:
        unit = 2 * rule.layer + rule.plane
        segment = coder_of(rule, profile.head_dim, is_half=profile.dtype == "float16", tables=profile.tables)
        start = -(-end // 64) * 64
        end = start + segment.stored_bytes(12)
        segment.encode(units[unit], expected[start:end])
        segment.decode(expected[start:end], alone[unit])
    assert end == stored.size
    np.testing.assert_array_equal(stored, expected)
    np.testing.assert_array_equal(decoded.view(np.uint16), alone.reshape(-1))


@pytest.mark.parametrize("dim", [32, 20])
def test_codes_of_int_are_the_nearest(dim: int) -> None:
    """By numpy, from the scales that were stored: with the vectors that sixteen dims make, and without."""
    shape = Shape(1, 2, 12, 3, dim, "bfloat16")
    codec = profiled(shape, "int", 8)
    for payload in [*adversaries(shape).values(), values_like_kv(shape, seed=13)]:
        stored = np.zeros(codec.stored_bound(shape), np.uint8)
        try:
            codec.encode(shape, payload.data, stored.data)
        except DoesNotFit:
            continue
        raw = floats_of(payload, shape).astype(np.float32)[0]
        at = 0
        for plane, count in enumerate((dim, 12)):
            at = -(-at // 64) * 64
            scales = stored[at : at + 12 * count].copy().view(np.float16).astype(np.float32)
            at += 12 * count
            for head, (low, step) in enumerate(scales.reshape(3, 2, count)):
                mine = raw[plane, :, head]
                z, s = (low[:, None], step[:, None]) if plane else (low, step)
                places = (mine - z) / np.where(s > 0, s, np.float32(1))
                codes = stored[at : at + 12 * dim].reshape(12, dim)
                at += 12 * dim
                np.testing.assert_array_equal(codes, np.rint(np.clip(places, 0, 255)).astype(np.uint8))
