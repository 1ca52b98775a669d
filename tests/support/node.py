"""In-process servers and their clients."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from regions import leftovers, prove_invariants, remove_leftovers, unique_name

from radixshmem import Geometry, RadixClient, RadixServer, ServerConfig

INDEX_ONLY = Geometry(block_size=16, full_slot_bytes=4096, full_slots=2000)


@dataclass
class Node:
    """In-process radix-servers and the clients of one test."""

    stack: ExitStack
    servers: dict[str, RadixServer] = field(default_factory=dict)

    def serve(self, **settings: Any) -> str:
        """Start a server; returns its name.  It is stopped, and its invariants proved, at the end."""
        name = settings.setdefault("name", unique_name())
        server = RadixServer(ServerConfig(metrics_address="", **settings)).start()
        self.stack.callback(remove_leftovers, name)
        self.stack.callback(self._stop, name)
        self.servers[name] = server
        return str(name)

    def join(self, name: str, geometry: Geometry | None = None, **options: Any) -> RadixClient:
        """A client of ``name``, ready to use."""
        client = self.stack.enter_context(RadixClient(name, geometry, **options))
        client.wait_ready(30)
        return client

    def client(self, geometry: Geometry = INDEX_ONLY, **settings: Any) -> RadixClient:
        """A client of a server of its own."""
        return self.join(self.serve(**settings), geometry)

    def _stop(self, name: str) -> None:
        server = self.servers[name]
        if server.info.mode == "ready":
            prove_invariants(name)
        server.close()
        assert leftovers(name) == []
