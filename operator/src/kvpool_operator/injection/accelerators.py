"""Accelerators on which the client does not run, by a container's resources and image.

The engines' offloading interfaces that the client uses exist for CUDA, ROCm, XPU and CPU. Images for other accelerators
often set PYTHONPATH, which an injected one would hide, so these pods are left alone.
"""

from __future__ import annotations

import re
from typing import Any, Final

__all__ = ["accelerator", "accelerator_of_image"]

_RESOURCES: Final = {
    "google.com/tpu": "Google TPU",
    "cloud-tpus.google.com/": "Google TPU",
    "habana.ai/": "Intel Gaudi",
    "huawei.com/": "Huawei Ascend",
    "aws.amazon.com/neuron": "AWS Neuron",
    "rebellions.ai/": "Rebellions NPU",
    "furiosa.ai/": "Furiosa NPU",
    "ibm.com/spyre": "IBM Spyre",
    "tenstorrent.com/": "Tenstorrent",
    "cambricon.com/": "Cambricon MLU",
    "qualcomm.com/qaic": "Qualcomm Cloud AI",
}
_IMAGES: Final = {
    "tpu": "Google TPU",
    "gaudi": "Intel Gaudi",
    "habana": "Intel Gaudi",
    "hpu": "Intel Gaudi",
    "ascend": "Huawei Ascend",
    "cann": "Huawei Ascend",
    "npu": "Huawei Ascend",
    "neuron": "AWS Neuron",
    "neuronx": "AWS Neuron",
    "rbln": "Rebellions NPU",
    "furiosa": "Furiosa NPU",
    "spyre": "IBM Spyre",
    "tenstorrent": "Tenstorrent",
}


def accelerator(container: dict[str, Any]) -> str:
    """Return the name of an accelerator that the client does not support, or an empty string."""
    resources = container.get("resources") or {}
    requested = {str(r) for kind in ("limits", "requests") for r in resources.get(kind) or {}}
    for prefix, name in _RESOURCES.items():
        if any(r.startswith(prefix) for r in requested):
            return name
    return accelerator_of_image(str(container.get("image") or ""))


def accelerator_of_image(image: str) -> str:
    """Return the name of an accelerator for which the image is made, among those that the client does not support."""
    image = image.partition("@")[0].lower()
    words = re.findall(r"[a-z]+", image.partition("/")[2] or image)
    return next((_IMAGES[w] for w in words if w in _IMAGES), "")
