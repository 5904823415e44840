"""Whose a request is: the client by its key, and the domain within which caches are shared.

A client that has a key is known by the key's name. Without keys all requests on loopback are of one domain; beyond
loopback each request is a domain of its own, unless it gives a `cache_salt`. A salt narrows any domain further.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.core.sequence import Owner, digest_of


class ApiKey(NamedTuple):
    key: str
    client: str  # keys of one name are of one client

    @classmethod
    def unnamed(cls, key: str) -> ApiKey:
        return cls(key, f"key-{digest_of(key)}")


class Sharing(NamedTuple):
    """`on_network`: machines other than this one can connect; `share_caches`: all clients are of one domain."""

    on_network: bool = False
    share_caches: bool = False

    def owner(self, key_client: str | None, address: str, salt: str | None, request_id: str) -> Owner:
        """Return the owner of a request. `key_client`: the client that its key names; None: the server has no keys."""
        client = key_client if key_client is not None else address if self.on_network else ""
        if key_client is None and self.on_network and not self.share_caches and salt is None:
            return Owner(request_id, client, lasts=False)
        domain = "" if self.share_caches or key_client is None else key_client
        return Owner(domain, client).narrowed(salt)  # a client's name has no blank, so the names of domains differ
