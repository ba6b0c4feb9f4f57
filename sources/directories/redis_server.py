"""RedisDirectory: records of hosts in Redis or Valkey: one server, Sentinel or Cluster.

    {kvtier:FLEET}:hosts         a set of lives
    {kvtier:FLEET}:host:LIFE     the record of one, which expires

The braces keep them in one slot of a Cluster. A record is renewed by PEXPIRE, which a full server still
carries out: no host leaves because there is no memory. That it was renewed also says that nothing was lost;
when it was not, the server was flushed, or another one took over without the last writes.

Nothing here tries a command again: what calls it comes again in a moment.
"""

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from .addresses import DirectoryAccess, DirectoryAddress, DirectoryError
from .records import MAX_RECORDS, TTL_S, HostRecord, Met, read_records

if TYPE_CHECKING:
    from redis.asyncio import Redis, RedisCluster

    Client: TypeAlias = Redis | RedisCluster

STEP_RECORDS: Final = 256  # read at a time
MAX_CONNECTIONS: Final = 32


def open_client(address: DirectoryAddress, access: DirectoryAccess, timeout_s: float) -> "Client":
    """Return a client, which connects when it is used; no answer is waited for longer than `timeout_s`.
    Raises DirectoryError."""
    try:
        from redis.asyncio import Redis, RedisCluster
        from redis.asyncio.cluster import ClusterNode
        from redis.asyncio.retry import Retry
        from redis.asyncio.sentinel import Sentinel
        from redis.backoff import NoBackoff
        from redis.credentials import CredentialProvider
    except ImportError:
        raise DirectoryError("the package redis is missing; `pip install kvtier[redis]`") from None

    class FileCredentials(CredentialProvider):
        """Reads the password anew for every connection."""

        async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
            password = access.password()
            return (address.username, password) if address.username else (password,)

    common: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "max_connections": MAX_CONNECTIONS,
    }
    if access.password_file is not None:
        common["credential_provider"] = FileCredentials()
    if address.is_tls:
        files = {"ssl_ca_certs": access.ca, "ssl_certfile": access.certificate, "ssl_keyfile": access.key}
        common |= {"ssl": True} | {key: str(file) for key, file in files.items() if file is not None}
    if address.shape == "cluster":
        nodes = [ClusterNode(host, port) for host, port in address.nodes]
        # Once more after a redirection, with the new table of slots.
        return RedisCluster(startup_nodes=nodes, **common | {"retry": Retry(NoBackoff(), 1)})
    if address.shape == "sentinel":
        open_sentinels: Any = Sentinel
        sentinel = open_sentinels(address.nodes, sentinel_kwargs=common, db=address.database, **common)
        if credentials := common.get("credential_provider"):  # Sentinels may want none
            bare = {key: value for key, value in common.items() if value is not credentials}
            sentinel.sentinels += open_sentinels(address.nodes, sentinel_kwargs=bare).sentinels
        master: Redis = sentinel.master_for(address.master)
        return master
    host, port = address.nodes[0]
    return Redis(host=host, port=port, db=address.database, **common)


def pipeline_of(client: "Client") -> Any:
    """Return a batch of commands, none of which waits for another one."""
    return client.pipeline(transaction=False)


async def close_client(client: "Client") -> None:
    """End all connections, those to Sentinels among them. Idempotent."""
    await client.aclose()
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for sentinel in manager.sentinels if manager is not None else ():
        await sentinel.aclose()


@contextmanager
def explained() -> Iterator[None]:
    """Turn what the client raises inside into DirectoryErrors."""
    from redis.exceptions import RedisClusterException, RedisError

    try:
        yield
    except (RedisError, RedisClusterException, OSError, ValueError) as failure:
        raise DirectoryError(f"{type(failure).__name__}: {str(failure)[:200]}") from failure


class RedisDirectory:
    """A fleet's records in Redis."""

    def __init__(self, client: "Client", fleet: str) -> None:
        self._client = client
        self._hosts = f"{{kvtier:{fleet}}}:hosts"
        self._host = f"{{kvtier:{fleet}}}:host:"

    async def meet(self, own: HostRecord) -> Met:
        """See HostDirectory."""
        with explained():
            async with pipeline_of(self._client) as batch:
                batch.pexpire(f"{self._host}{own.epoch}", round(TTL_S * 1000))
                batch.sismember(self._hosts, str(own.epoch))
                batch.smembers(self._hosts)
                is_renewed, is_listed, lives = await batch.execute()
            is_new = not (is_renewed and is_listed)
            problem = await self._register(own) if is_new else ""
            own_life = str(own.epoch).encode()
            listed = set(lives) if problem else {*lives, own_life}
            own_first = sorted(listed, key=lambda life: (life != own_life, life))
            records, num_unreadable = await self._read(own_first[:MAX_RECORDS])
            if not problem and own not in records:  # another host says it lives this life, and hides a loss
                is_new, problem = True, await self._register(own)
                records = [*(one for one in records if one.epoch != own.epoch), own]
        return Met(records, num_unreadable, is_new, problem)

    async def _register(self, own: HostRecord) -> str:
        """Write the record. Returns why the server does not take it; empty when it did."""
        from redis.exceptions import ResponseError

        try:
            async with pipeline_of(self._client) as batch:
                batch.set(f"{self._host}{own.epoch}", own.text(), px=round(TTL_S * 1000))
                batch.sadd(self._hosts, str(own.epoch))
                await batch.execute()
        except ResponseError as refused:
            return str(refused)[:200]
        return ""

    async def _read(self, lives: list[bytes]) -> tuple[list[HostRecord], int]:
        """Return the records of lives; those that have ended are taken out of the set."""
        records, num_unreadable, ended = list[HostRecord](), 0, list[bytes]()
        for start in range(0, len(lives), STEP_RECORDS):
            step = lives[start : start + STEP_RECORDS]
            values = await self._client.mget([self._host.encode() + life for life in step])
            ended += [life for life, value in zip(step, values, strict=True) if value is None]
            found, num_bad = read_records([value for value in values if isinstance(value, bytes)])
            records, num_unreadable = records + found, num_unreadable + num_bad
        if ended:
            removed: Awaitable[int] | int = self._client.srem(self._hosts, *ended)
            assert not isinstance(removed, int)
            await removed
        return records, num_unreadable

    async def leave(self, own: HostRecord) -> None:
        """See HostDirectory."""
        with explained():
            async with pipeline_of(self._client) as batch:
                batch.delete(f"{self._host}{own.epoch}")
                batch.srem(self._hosts, str(own.epoch))
                await batch.execute()

    async def close(self) -> None:
        """See HostDirectory."""
        await close_client(self._client)
