"""`helm test`, in a pod that asked for a pool: was it injected, and does a block come back from the pool?

Without a pool to ask for, the webhook's answer that there is none shows that it was asked.
"""

import os
import secrets
import sys
import time

WAIT_S = 60.0
BLOCK = 1 << 20


def notes(path):
    """The pod's annotations, from the file of the downward API: a line of NAME="VALUE" for each."""
    with open(path, encoding="utf-8") as file:
        pairs = (line.rstrip("\n").partition("=") for line in file)
        return {name: value.strip('"') for name, _, value in pairs}


def bring_a_block():
    # what the injection brought
    from kvpool.client import Client
    from kvpool.engines.common.settings import client_config

    client = Client(client_config({}), fingerprint=secrets.token_bytes(32), labels={"engine": "helm test"})
    until = time.monotonic() + WAIT_S
    while not client.connected:
        if time.monotonic() > until:
            sys.exit(f"no sidecar on this node answered within {WAIT_S:.0f} s: is it one of the pool's nodes?")
        time.sleep(0.2)
    block_id, payload, buffer = secrets.token_bytes(32), secrets.token_bytes(BLOCK), bytearray(BLOCK)
    (stored,) = client.put_from([block_id], [payload], time.monotonic() + WAIT_S)
    if not stored.ok:
        sys.exit(f"the pool did not take a block: {stored.reason}")
    (loaded,) = client.get_into([block_id], [buffer], time.monotonic() + WAIT_S)
    if not loaded.ok:
        sys.exit(f"the block was not to be had: {loaded.reason}")
    if buffer != payload:
        sys.exit("the block came back with other bytes")
    print(f"a block of {BLOCK} bytes was stored and came back from tier {loaded.tier.name.lower()}")


def main():
    told = notes(os.environ["TEST_ANNOTATIONS"])
    skipped, wanted = told.get("kvpool.dev/skip-reason", ""), os.environ.get("TEST_POOL", "")
    if "kvpool.dev/injected" not in told and not skipped:
        sys.exit("the webhook was not asked: it is away, or the API server cannot reach it or does not trust it")
    if not wanted:
        print(f"the webhook was asked and said: {skipped}")
    elif skipped:
        sys.exit(f"the pod was not injected: {skipped}")
    else:
        bring_a_block()


if __name__ == "__main__":
    main()
