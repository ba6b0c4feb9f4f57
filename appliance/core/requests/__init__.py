"""What each request does: get, put, pin, lease, session, evict, erase; and what waits for room.

Answers are made by `request_registry.py` and leave through the outbox.
Imports the other folders of the core; imported by `planner.py`.
"""
