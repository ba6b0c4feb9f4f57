"""What is counted of a store's requests, and for how long it belongs to the day."""

from kvtier.sources.objects.usage import RECEIVED, SENT, StoreRequest, StoreUsage


def test_a_day_has_the_requests_of_24_hours() -> None:
    now = 0.0
    usage = StoreUsage(lambda: now)
    usage.add(StoreRequest("put", sent_bytes=100), 0.5)
    now = 23 * 3600.0
    usage.add(StoreRequest("get", "missing"), 0.25)
    usage.add(StoreRequest("get", received_bytes=7), 0.25)
    assert usage.last_day() == {"put": 1, "get": 2, SENT: 100, RECEIVED: 7}
    now = 24 * 3600.0
    assert usage.last_day() == {"get": 2, RECEIVED: 7}
    now = 47 * 3600.0
    assert not usage.last_day()
    usage.add(StoreRequest("put", "exists"), 0.5)
    assert usage.last_day() == {"put": 1}
    assert usage.requests() == {
        ("put", "ok"): 1,
        ("get", "missing"): 1,
        ("get", "ok"): 1,
        ("put", "exists"): 1,
    }
    assert usage.seconds() == {"put": 1.0, "get": 0.5}
    assert usage.bytes() == {SENT: 100, RECEIVED: 7}
