"""Other hosts of the fleet: which there are, what each holds, and fetching from one.

    peer_edge > hosts > members      this host asks: members, their inventories, fetches
    meeting, index, index_writer     members from a directory; an index there instead of inventories
    data_listener > tickets, holdings      this host answers: what it holds, tickets, bytes
    fleet_tls      certificates of hosts

The bytes on the way are of sources/peers. Imported by `host`; docs/operate/fleet.md is for operators.
"""
