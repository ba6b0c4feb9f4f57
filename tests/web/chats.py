"""Chats: a runtime without a model. Conversations of every urgency against a real daemon, so that a page has
something to show.

Users think, agents wait for tools, system prompts are shared, some users leave for good. What is stored are
random floats in bfloat16, so that codecs do what they do to KV. Timing depends on the machine: nothing here
is for asserting numbers.
"""

from __future__ import annotations

import hashlib
import heapq
import threading
import time
from dataclasses import dataclass, field
from random import Random

import numpy as np

from kvtier.clients import Client, Geometry, NamespaceIdentity, Session, Tier, Urgency
from kvtier.clients.options import Timeout

GEOMETRY = Geometry(
    num_layers=8, num_kv_heads=4, head_dim=64, block_tokens=16, dtype="bfloat16", layers_per_group=4
)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"chats").digest(), GEOMETRY)
SYSTEM_BLOCKS = 12
TURN_BLOCKS = 10
MAX_BLOCKS = 120
NUM_SYSTEM_PROMPTS = 3
PATIENT = Timeout(call_s=60.0, connect_s=60.0)  # on machines that do other things besides
ROLES = ("chat", "agent", "review", "summary")

SETTINGS = {
    "tiers.hbm.capacity": "32MiB",
    "tiers.dram.capacity": "96MiB",
    "tiers.dram.extent": "16MiB",
    "tiers.nvme.capacity": "384MiB",
    "tiers.nvme.segment": "16MiB",
}


@dataclass(slots=True)
class Chat:
    """One conversation."""

    name: str
    chain: list[bytes]
    num_turns: int = 0


@dataclass(slots=True)
class Chats:
    """Plays conversations until `stop`; `pace` is how many turns a second to aim at."""

    target: str
    pace: float = 12.0
    num_chats: int = 28
    seed: int = 7
    names: tuple[str, ...] = ()  # of the first chats, instead of made-up ones
    fastest: Tier = Tier.HBM
    num_turns: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def play(self) -> None:
        """Play until told to stop."""
        rng = Random(self.seed)
        numbers = np.random.default_rng(self.seed).standard_normal((256 * GEOMETRY.block_bytes) // 2)
        payload = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        with Client(self.target, name="chats", timeout=PATIENT) as client:
            namespace = client.register(IDENTITY)
            into = np.empty(MAX_BLOCKS * 2 * GEOMETRY.block_bytes, np.uint8)
            agenda = [(rng.random() * 2.0, n, self._begin(rng, n)) for n in range(self.num_chats)]
            heapq.heapify(agenda)
            count, began_at = self.num_chats, time.monotonic()
            while not self.stop.wait(max(0.0, began_at + agenda[0][0] - time.monotonic())):
                due_s, number, chat = heapq.heappop(agenda)
                session = Session(client, chat.name)
                session.update(Urgency.PREFILL)
                size = len(chat.chain) * GEOMETRY.block_bytes
                found = client.get(namespace, chat.chain, into[:size], session=chat.name).num_loaded
                new = _names(chat, rng.randint(2, TURN_BLOCKS))
                missing, parent = chat.chain[found:] + new, chat.chain[found - 1] if found else b""
                start = rng.randrange(64) * GEOMETRY.block_bytes
                data = payload[start : start + len(missing) * GEOMETRY.block_bytes]
                client.put(namespace, missing, data, parent=parent, session=chat.name)
                chat.chain += new
                chat.num_turns += 1
                self.num_turns += 1
                pause_s = self._pause(rng)
                if self._part(rng, session, pause_s) is Urgency.DECODING:
                    client.prefetch(namespace, chat.chain, target=self.fastest)
                if len(chat.chain) + TURN_BLOCKS > MAX_BLOCKS or rng.random() < 0.04:
                    session.end(archive=rng.random() < 0.7)
                    chat, count = self._begin(rng, count), count + 1
                    number = count
                heapq.heappush(agenda, (due_s + pause_s, number, chat))

    def _pause(self, rng: Random) -> float:
        """Return how long a chat is silent, so that all of them together keep the pace."""
        return rng.lognormvariate(0.0, 0.8) * self.num_chats / self.pace / 1.4

    def _part(self, rng: Random, session: Session, pause_s: float) -> Urgency:
        """Say what the session does until its next turn."""
        urgency = rng.choices(
            (Urgency.DECODING, Urgency.QUEUED, Urgency.WAITING, Urgency.IDLE), weights=(2, 1, 6, 3)
        )[0]
        back_in_s = pause_s if urgency is Urgency.WAITING else None
        session.update(urgency, back_in_s=back_in_s, num_decoded_tokens=rng.randint(20, 400))
        return urgency

    def _begin(self, rng: Random, number: int) -> Chat:
        name = self.names[number] if number < len(self.names) else f"{rng.choice(ROLES)}-{number:03d}"
        system = rng.choices(range(NUM_SYSTEM_PROMPTS), weights=(4, 2, 1))[0]
        chain = [hashlib.sha256(f"system {system} {i}".encode()).digest() for i in range(SYSTEM_BLOCKS)]
        return Chat(name, chain)


def _names(chat: Chat, num_blocks: int) -> list[bytes]:
    """Return the names of the blocks of a turn."""
    begin = len(chat.chain)
    return [hashlib.sha256(f"{chat.name} {begin + i}".encode()).digest() for i in range(num_blocks)]
