"""PYTHONPATH that published images of engines set.

The webhook does not see the variables of an image, and an injected PYTHONPATH replaces them. Directories of known
images are therefore added after the client's. A directory that does not exist changes nothing.
"""

from __future__ import annotations

import re
from typing import Final

from kvpool_operator.injection.accelerators import accelerator_of_image

__all__ = ["image_pythonpath"]

_BY_NAME: Final = (
    # KServe: python/huggingface_server.Dockerfile and huggingface_server_cpu.Dockerfile
    (re.compile(r"^huggingfaceserver"), ("/kserve-workspace/huggingfaceserver", "/huggingfaceserver")),
    # llm-d before 0.3: NIXL outside of the environment of Python
    (re.compile(r"^llm-d"), ("/usr/local/nixl/lib/python3/dist-packages",)),
)
_ASCEND: Final = "/usr/local/Ascend/ascend-toolkit/latest"
_BY_ACCELERATOR: Final = {
    "Intel Gaudi": ("/root", "/usr/lib/habanalabs"),
    "Huawei Ascend": (f"{_ASCEND}/python/site-packages", f"{_ASCEND}/opp/built-in/op_impl/ai_core/tbe"),
}


def image_pythonpath(image: str) -> tuple[str, ...]:
    """Return the directories that images of this name have in PYTHONPATH."""
    name = image.partition("@")[0].rpartition("/")[2].partition(":")[0].lower()
    known = next((paths for pattern, paths in _BY_NAME if pattern.search(name)), ())
    return (*known, *_BY_ACCELERATOR.get(accelerator_of_image(image), ()))
