"""The engine's line that `kvpool up` prints is what the webhook sets."""

from kvpool_operator.injection.connector import vllm_connector
from kvpool_sidecar.commands import up_text


def test_vllm_gets_the_connector_of_the_webhook():
    assert up_text.vllm_connector(8 << 30, 256) == vllm_connector(block_tokens=256, host_memory_bytes=8 << 30)
