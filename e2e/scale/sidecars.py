"""Answers /status on every address of the played pods, like sidecars that serve: one process, one port, all addresses.

`python sidecars.py`: runs until it is told to end. Only in a network of its own, where the pods' addresses are local.
"""

from __future__ import annotations

import asyncio
import json

PORT = 7422
MOST_HEADER = 8192


def status(address: str) -> bytes:
    """What a sidecar of a quiet pool says; all of them report the same numbers under their own names."""
    told = {
        "node": address,
        "generation": 1,
        "ready": True,
        "capacity_bytes": 8 * 2**30,
        "used_bytes": 2**30,
        "blocks": 32,
        "index": {"configured": True, "connected": True, "epoch": "e", "announced": 32},
        "shared": {"configured": False, "available": False, "problem": ""},
        "drives": {"nvme": "ok"},
        "clients": 4,
        "cache": {
            "windows": [
                {"window": window, "tokensAsked": 800, "tokensFound": 600, "misses": {"expired": 200}}
                for window in ("5m", "1h")
            ],
            "models": [],
        },
        "hits": {"local": 6, "peer": 3, "shared": 0},
        "bytes": {"local": 6 * 2**25, "peer": 3 * 2**25, "shared": 0},
        "misses": {"absent": 3},
        "transport": "TCP",
        "preflight": {"version": 1, "passed": True, "findings": []},
        "fingerprints": [{"digest": "4be1c0", "engine": "vllm 0.33", "model": "llama", "bytes": 2**30}],
    }
    return json.dumps(told).encode()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, kept alive as the operator's is."""
    address = writer.get_extra_info("sockname")[0]
    try:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            body = status(address)
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
        pass
    finally:
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(answer, "0.0.0.0", PORT, limit=MOST_HEADER, backlog=512)
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
