"""Time limits for tests that ask what is answered, and not how soon.

A connector counts an answer that comes late as a miss, which is right, and would make every test of hits a
test of the machine, which may stand still for a second. So it is with what would be slower to load than to
compute: that depends on the disk. Tests that ask what a slow appliance costs keep the defaults.
"""

CONNECTOR = {
    "answer_timeout_s": 120.0,
    "promote_timeout_s": 120.0,
    "load_timeout_s": 120.0,
    "save_timeout_s": 120.0,
    "report_prefill": False,
}
TIER = {"lookup_timeout_s": 120.0, "load_timeout_s": 120.0, "store_timeout_s": 120.0}
