"""The event bus of blocks: typed dispatch, order, and handlers that fail."""

from __future__ import annotations

from kvpool_sidecar.blocks.events import BlockEvents, BlockPromoted, BlocksRemoved


def test_handlers_get_events_of_their_type_in_order_of_subscription():
    bus, seen = BlockEvents(), []
    bus.subscribe(BlocksRemoved, lambda event: seen.append(("first", event.block_keys)))
    bus.subscribe(BlocksRemoved, lambda event: seen.append(("second", event.block_keys)))
    bus.emit(BlockPromoted(b"k", 1))
    assert seen == []
    bus.emit(BlocksRemoved([b"k"]))
    assert seen == [("first", [b"k"]), ("second", [b"k"])]


def test_an_exception_of_a_handler_reaches_neither_the_emitter_nor_other_handlers(caplog):
    bus, seen = BlockEvents(), []

    def fail(event: BlocksRemoved) -> None:
        raise ValueError("broken handler")

    bus.subscribe(BlocksRemoved, fail)
    bus.subscribe(BlocksRemoved, seen.append)
    bus.emit(BlocksRemoved([b"k"]))
    assert seen == [BlocksRemoved([b"k"])]
    assert "a subscriber of BlocksRemoved failed" in caplog.text


def test_a_subscription_ends():
    bus, seen = BlockEvents(), []
    cancel = bus.subscribe(BlocksRemoved, seen.append)
    assert bus.has_subscribers(BlocksRemoved)
    cancel()
    cancel()
    assert not bus.has_subscribers(BlocksRemoved)
    bus.emit(BlocksRemoved([b"k"]))
    assert seen == []
