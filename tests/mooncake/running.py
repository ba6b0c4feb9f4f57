"""A pool at ports that no other test is given."""

from examples.mooncake_pool import MooncakeProcesses

from ..ports import free_port


class Pool(MooncakeProcesses):
    """See MooncakeProcesses."""

    find_port = staticmethod(free_port)
