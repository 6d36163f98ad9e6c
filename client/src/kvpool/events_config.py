"""Configuration schema of the KV events, a part of kvpool.config."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.errors import ConfigError
from kvpool.schema import doc

__all__ = ["EventsConfig"]


@dataclass(frozen=True)
class EventsConfig:
    """KV events for routers, in vLLM's wire format (docs/reference/kv-events.md)."""

    enabled: bool = doc("Publish the blocks of this node and answer routers.", default=False)
    port: int = doc("ZeroMQ PUB socket on the pod's address.", default=5557)
    replay_port: int = doc("ZeroMQ ROUTER socket for replay of missed messages, on the pod's address.", default=5558)
    topic: str = doc(
        "Topic of the messages; `{node}`, `{pool}` and `{namespace}` are substituted.", default="kv@{node}@"
    )
    hashes: str = doc(
        "Int64 (each of the engine's blocks by 64 bits, as vLLM publishes them by default) or Bytes (a whole hash for "
        "each stored block).",
        default="Int64",
    )
    prompt_tokens_of: str = doc(
        "Tenant whose token ids the events contain; then no other tenant's blocks are published. Needs Int64. Empty: "
        "no token ids.",
        default="",
    )
    token_revision: int = doc("A change rotates the bearer token and the stream's keys of routers.", default=0)
    authentication: str = doc("Curve (subscribers of the stream need the routers' key) or None.", default="Curve")

    def __post_init__(self) -> None:
        if not (0 <= self.port < 65536 and 0 <= self.replay_port < 65536) or self.port == self.replay_port != 0:
            raise ConfigError("events: port and replay_port must be two different ports")
        if self.hashes not in ("Bytes", "Int64"):
            raise ConfigError(f"events.hashes: unknown {self.hashes!r}")
        if self.authentication not in ("Curve", "None"):
            raise ConfigError(f"events.authentication: unknown {self.authentication!r}")
        if self.prompt_tokens_of and self.hashes != "Int64":
            raise ConfigError("events: prompt_tokens_of needs hashes: Int64")
        if max(len(self.topic), len(self.prompt_tokens_of)) > 512 or not 0 <= self.token_revision < 1 << 32:
            raise ConfigError("events: topic and prompt_tokens_of have at most 512 characters, token_revision 32 bits")
