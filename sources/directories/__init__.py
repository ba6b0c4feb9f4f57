"""Directories: services in which hosts of a fleet find each other, and say what they hold.

    opening > etcd, redis_server > addresses, records    one HostDirectory for each kind of service

What a directory says is a hint, as all that hosts say: a wrong entry is a host that does not answer, or a
miss. Nothing here decides which of it is believed; that is appliance/fleet.
"""
