"""Names that vLLM gives the blocks of prompts with media. Run with the engine's own Python; prints one JSON line.

The prompt has an image in the middle, as placeholder tokens; each identifier on the command line is one image.
"""

from __future__ import annotations

import json
import sys

BLOCK, BLOCKS, FIRST, LENGTH = 32, 6, 70, 20  # the image is in the third block


def main(identifiers: list[str]) -> None:
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_function = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(hash_function)
    names = []
    for identifier in identifiers:
        place = PlaceholderRange(offset=FIRST, length=LENGTH)
        image = MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)
        request = Request(
            request_id="request",
            prompt_token_ids=[3 + i % 500 for i in range(BLOCKS * BLOCK)],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            mm_features=[image],
            block_hasher=get_request_block_hasher(BLOCK, hash_function),
        )
        names.append([name.hex() for name in request.block_hashes])
    print(json.dumps(names))


if __name__ == "__main__":
    main(sys.argv[1:])
