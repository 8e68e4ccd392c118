"""Stubs that let SGLang run on a CPU, without packages that exist only for GPUs. Python runs this module at the start
of each process that has this folder in PYTHONPATH, also in the processes that SGLang spawns.

SGLang imports these packages on every machine, and uses them only on GPUs, or for media and data sets. Their imports
return modules in which every name exists and does nothing. Two parts of SGLang's host pools are replaced: the
registration and pinning of memory with CUDA, and the copies between device and host, which are GPU kernels. One part is
corrected: where attention reads a window.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

_ABSENT = {
    "sgl_kernel", "flashinfer", "deep_gemm", "torchao", "decord", "torch_memory_saver", "torchvision", "gguf",
    "datasets", "soundfile",  # for SGLang's HTTP server and its test kits
}


class _StubType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub()


class _Stub(metaclass=_StubType):
    """Replaces any function, class or constant."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *arguments: Any, **_: object) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub()


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # A new class each time, because SGLang derives from some.
        made: Any = _StubType(name, (_Stub,), {}) if name[:1].isupper() else _Stub()
        setattr(self, name, made)
        return made


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in _ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


_find_spec = importlib.util.find_spec


def _installed_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a package; None for a stub, so that a check for the package fails."""
    spec = _find_spec(name, package)
    return None if spec is not None and isinstance(spec.loader, _Stubs) else spec


sys.meta_path.append(_Stubs())  # last, so that installed packages are used
importlib.util.find_spec = _installed_spec


def _copied_on_the_cpu(mha: types.ModuleType) -> None:
    def rows(pool: Any, layers: Any, layer: int, indices: Any) -> Any:
        """Return one layer of the host pool, and the index of tokens in it: by page and offset, or by token."""
        if pool.layout == "page_first_direct":
            return layers[layer], (indices // pool.page_size, indices % pool.page_size)
        return layers[layer], (indices,)

    def load(pool: Any, _: Any, host: Any, device: Any, layer: int, __: str, *, is_draft: bool = False) -> None:
        for layers, targets in ((pool.k_data_refs, pool.device_k_buffers), (pool.v_data_refs, pool.device_v_buffers)):
            source, where = rows(pool, layers, layer, host.cpu())
            targets[layer][device] = source[where]

    def backup(pool: Any, _: Any, host: Any, device: Any, __: str) -> None:
        for layers, sources in ((pool.k_data_refs, pool.device_k_buffers), (pool.v_data_refs, pool.device_v_buffers)):
            for layer, source in enumerate(sources):
                target, where = rows(pool, layers, layer, host.cpu())
                target[where] = source[device]

    def page(pool: Any) -> Any:
        pool.pin_memory = False
        return pinned_page(pool)

    pinned_page = mha.MHATokenToKVPoolHost.get_dummy_flat_data_page
    mha.MHATokenToKVPoolHost.get_dummy_flat_data_page = page
    mha.MHATokenToKVPoolHost.load_to_device_per_layer = load
    mha.MHATokenToKVPoolHost.backup_from_device_all_layer = backup


def _states_copied_on_the_cpu(mamba: types.ModuleType) -> None:
    def states(pool: Any) -> list[tuple[Any, list[Any]]]:
        """Return each buffer of the host pool with the layers of the device pool, whose slots it has."""
        return [
            (pool.temporal_buffer, pool.temporal_device_layers),
            *zip(pool.conv_buffer, pool.conv_device_layers, strict=True),
        ]

    def load(pool: Any, _: Any, host: Any, device: Any, layer: int, __: str, *, is_draft: bool = False) -> None:
        for buffer, layers in states(pool):
            layers[layer][device] = buffer[host.cpu(), layer, 0]

    def backup(pool: Any, _: Any, host: Any, device: Any, __: str) -> None:
        for buffer, layers in states(pool):
            for layer, source in enumerate(layers):
                buffer[host.cpu(), layer, 0] = source[device]

    mamba.MambaPoolHost.load_to_device_per_layer = load
    mamba.MambaPoolHost.backup_from_device_all_layer = backup


def _windows_read_at_their_slots(torch_native: types.ModuleType) -> None:
    """SGLang's attention on a CPU writes a sliding window into its own pool, but reads it at the slots of full
    attention. Both are equal only until slots are used again."""
    backend = torch_native.TorchNativeAttnBackend

    def translated(run: Callable[..., Any]) -> Callable[..., Any]:
        def attend(own: Any, query: Any, output: Any, keys: Any, values: Any, slots: Any, *rest: Any, **by: Any) -> Any:
            pool = own.token_to_kv_pool
            if own.use_sliding_window_kv_pool:
                windows = {layer.data_ptr() for layer in pool.swa_kv_pool.k_buffer}
                if keys.data_ptr() in windows:
                    slots = pool.translate_loc_from_full_to_swa(slots.long())
            return run(own, query, output, keys, values, slots, *rest, **by)

        return attend

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(backend, name, translated(getattr(backend, name)))


def _adapters_not_pinned(_: types.ModuleType) -> None:
    """SGLang pins the memory of LoRA adapters, which torch refuses on a machine without a GPU."""
    import torch  # noqa: PLC0415

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, pin_memory: bool = False, **more: Any) -> Any:
            return make(*arguments, **more)

        return made

    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def _latent_kv_read(handler: types.ModuleType) -> None:
    """SGLang would expand the latent KV of a prefill without a prefix, which its attention on a CPU cannot do."""
    handler.AttentionBackendRegistry.register("torch_native", lambda *_: handler.AttnForwardMethod.MLA)


def _books_checked(tree: types.ModuleType) -> None:
    """Check the books of HiCache's tree in each step of the scheduler, if SGLang checks its slots in each step."""
    if os.environ.get("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY") != "1":
        return
    poll = tree.HiCacheTree.check_hicache_events

    def poll_and_check(own: Any) -> None:
        poll(own)
        own.cache.check()

    tree.HiCacheTree.check_hicache_events = poll_and_check


def _not_registered(common: types.ModuleType) -> None:
    common._cuda_host_register = lambda *_: None  # type: ignore[attr-defined]


_POOLS = "sglang.srt.mem_cache.pool_host"
_REPLACED: dict[str, Callable[[types.ModuleType], None]] = {
    f"{_POOLS}.mha": _copied_on_the_cpu, f"{_POOLS}.mamba": _states_copied_on_the_cpu,
    f"{_POOLS}.common": _not_registered,
    "hicache.integrations.sglang_tree.tree": _books_checked, "sglang.srt.lora.layers": _adapters_not_pinned,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _latent_kv_read,
    "sglang.srt.layers.attention.torch_native_backend": _windows_read_at_their_slots,
}


class _Replacing(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        replace = _REPLACED.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if replace else None
        if replace is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_replace(module: types.ModuleType) -> None:
            execute(module)
            replace(module)

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Replacing())
