"""KVCacheOperation release: which requests it becomes, and what its receipt counts."""

from __future__ import annotations

from op_operation_world import World


async def test_a_release_names_the_session_by_its_digest_on_every_node():
    world = World(release={"tenant": "team-a", "session": "sha256:" + "ab" * 32})
    status = await world.run()
    requests = list(world.nodes.requests.values())
    assert requests == [("release", {"tenant": "team-a", "session": "ab" * 32})] * len(requests)
    assert len(requests) == status["nodes"]["total"] > 1
    assert status["results"]["local"]["blocks"] == 2 * len(requests)
