"""Stand-ins shared by test suites, benches and rehearsals.

They are not part of the wheel, and no product code imports them (tests/test_wheel.py)."""
