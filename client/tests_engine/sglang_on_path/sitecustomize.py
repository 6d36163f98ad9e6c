"""On the path of an SGLang server without a GPU: copies of pages that are plain torch, and host pools of any size.

SGLang has kernels for these copies on accelerators alone. Everything else of the server is as it was.
"""

import importlib.abc
import importlib.machinery
import sys

_POOLS = "sglang.srt.mem_cache.pool_host."


def _load_layer(self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False):
    self.device_k_buffers[layer_id][device_indices] = self.k_data_refs[layer_id][host_indices]
    self.device_v_buffers[layer_id][device_indices] = self.v_data_refs[layer_id][host_indices]


def _back_up(self, device_pool, host_indices, device_indices, io_backend):
    for layer in range(self.layer_num):
        self.k_data_refs[layer][host_indices] = self.device_k_buffers[layer][device_indices]
        self.v_data_refs[layer][host_indices] = self.device_v_buffers[layer][device_indices]


def _copies(module):
    module.MHATokenToKVPoolHost.load_to_device_per_layer = _load_layer
    module.MHATokenToKVPoolHost.backup_from_device_all_layer = _back_up


def _no_pinning(module):
    module._cuda_host_register = lambda *_: None


def _no_reserve(module):
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def _on_a_cpu(module):
    module.DEVICES.add("cpu")
    module.SPARE_BYTES = 0


_CHANGES = {
    f"{_POOLS}mha": _copies,
    f"{_POOLS}common": _no_pinning,
    f"{_POOLS}base": _no_reserve,
    "kvpool.engines.sglang.guard": _on_a_cpu,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _CHANGES[name](module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
