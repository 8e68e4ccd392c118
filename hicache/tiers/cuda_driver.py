"""Calls of the CUDA driver that torch does not export to Python, by ctypes.

The signatures are those of `cuda.h` (CUDA 12.8 and 13.0). The batched copy is used in its form of 12.8, which reports
the copy that failed; newer drivers still have this form. Older drivers have no batched copy, so there copies are queued
one by one.

Locking design: nothing here changes after the constructor. Any thread may call the driver; ctypes releases the
interpreter's lock during a call.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np

from ..errors import TransferError
from ..types import Addresses

LIBRARY = "libcuda.so.1"

_SUCCESS = 0
_NO_CONTEXT = 201
_NOT_READY = 600
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for all contexts of the process
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the legacy default stream
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_PRIORITY = -100  # clamped to the driver's highest priority, so that small kernels start during a large forward
_HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_BATCH_VERSION = 12080  # the first version with cuMemcpyBatchAsync
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_PREFER_OVERLAP = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE

_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDeviceGetPCIBusId": [c_char_p, c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],
    "cuMemHostUnregister": [c_void_p],
    "cuStreamCreateWithPriority": [POINTER(c_void_p), c_uint, c_int],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventDestroy_v2": [c_void_p],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventQuery": [c_void_p],
    "cuEventElapsedTime": [POINTER(c_float), c_void_p, c_void_p],
    "cuMemcpyAsync": [c_uint64, c_uint64, c_size_t, c_void_p],
}


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", c_int), ("id", c_int)]


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("source_access_order", c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", c_uint),
    ]


class CudaDriver:
    """One device of the driver, and its primary context, which torch uses too.

    Raises TransferError if the library cannot be loaded or a driver call fails. Tests replace `library`.
    """

    def __init__(self, device: int, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
            for name, types in _SIGNATURES.items():
                getattr(self._library, name).argtypes = types
        except (OSError, AttributeError) as error:
            raise TransferError(f"cuda: the driver's library cannot be used: {error}; install a driver") from error
        self._attributes = _CopyAttributes(source_access_order=_IN_STREAM_ORDER, flags=_PREFER_OVERLAP)
        self.call("cuInit", 0)
        number, context = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(number), device)
        self._device = number.value
        can_use = c_int()
        self.call("cuDeviceGetAttribute", byref(can_use), _HOST_POINTERS, self._device)
        # Under WSL2 a batched copy with addresses of registered memory is an illegal access; single copies translate
        # the addresses.
        self._batch = self._find_batch() if can_use.value else None
        # Never released: torch keeps the context until the process ends.
        self.call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self.context = context.value

    def call(self, name: str, *arguments: object) -> None:
        """Call a driver function. Raises TransferError if it fails."""
        self._require_success(name, self._status(name, *arguments))

    def attach(self) -> None:
        """Make the context current on the calling thread."""
        self.call("cuCtxSetCurrent", self.context)

    def pci_bus_id(self) -> str:
        """Return the device's bus address as sysfs writes it, such as `0000:3b:00.0`."""
        name = ctypes.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", name, len(name), self._device)
        return name.value.decode().lower()

    def register(self, address: int, size_bytes: int) -> None:
        """Pin host memory, for all devices."""
        with self.current():
            self.call("cuMemHostRegister_v2", address, size_bytes, _PORTABLE)

    def unregister(self, address: int) -> None:
        """Unpin memory that `register` pinned."""
        with self.current():
            self.call("cuMemHostUnregister", address)

    # Streams and events: handles are integers

    def stream(self) -> int:
        """Create a stream."""
        handle = c_void_p()
        with self.current():
            self.call("cuStreamCreateWithPriority", byref(handle), _NON_BLOCKING, _PRIORITY)
        return int(handle.value or 0)

    def event(self, *, timed: bool) -> int:
        """Create an event."""
        handle = c_void_p()
        with self.current():
            self.call("cuEventCreate", byref(handle), 0 if timed else _DISABLE_TIMING)
        return int(handle.value or 0)

    def wait(self, stream: int, event: int) -> None:
        """Queue a wait for `event` on `stream`. Stream 0 is the default stream of this device."""
        # The driver takes stream 0 as the default stream of the current context.
        with contextlib.nullcontext() if stream else self.current():
            self.call("cuStreamWaitEvent", stream, event, 0)

    def passed(self, event: int) -> bool:
        """True if the work before `event` has ended."""
        status = self._status("cuEventQuery", event)
        if status == _NOT_READY:
            return False
        self._require_success("cuEventQuery", status)
        return True

    def elapsed_s(self, begin: int, end: int) -> float:
        """Return the device time between two events, in seconds."""
        milliseconds = c_float()
        self.call("cuEventElapsedTime", byref(milliseconds), begin, end)
        return milliseconds.value / 1000

    # Copies

    def copy(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """Queue copies. Raises TransferError, which names the failed copy if the driver reports it."""
        if self._batch is None:
            for copy in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                self.call("cuMemcpyAsync", *copy, stream)
            return
        count, failed = len(targets), c_size_t(np.iinfo(np.uintp).max)
        first = c_size_t(0)  # all copies have the same attributes
        status = self._batch(
            targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, count,
            byref(self._attributes), byref(first), 1, byref(failed), stream,
        )
        if status != _SUCCESS:
            which = f"copy {failed.value} of {count}" if failed.value < count else f"{count} copies"
            raise TransferError(f"cuda: cuMemcpyBatchAsync: {which}: {self._reason(status)}")

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current inside the block; the calling thread may use another context, or none."""
        self._require_success("cuCtxPushCurrent_v2", self._library.cuCtxPushCurrent_v2(self.context))
        try:
            yield
        finally:
            self._require_success("cuCtxPopCurrent_v2", self._library.cuCtxPopCurrent_v2(byref(c_void_p())))

    def _find_batch(self) -> Any | None:
        """Return cuMemcpyBatchAsync as of CUDA 12.8, or None if the driver is older."""
        find = getattr(self._library, "cuGetProcAddress_v2", None)
        if find is None:
            return None
        find.argtypes = [c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int)]
        address, found = c_void_p(), c_int()
        status = find(b"cuMemcpyBatchAsync", byref(address), _BATCH_VERSION, 0, byref(found))
        if status != _SUCCESS or not address.value:
            return None
        kind = ctypes.CFUNCTYPE(
            c_int, c_void_p, c_void_p, c_void_p, c_size_t,
            POINTER(_CopyAttributes), POINTER(c_size_t), c_size_t, POINTER(c_size_t), c_void_p,
        )
        return kind(address.value)

    def _status(self, name: str, *arguments: object) -> int:
        """Call a function. If the calling thread has no context, call it again with the context: a thread that only
        queries events may have none."""
        function = getattr(self._library, name)
        status = int(function(*arguments))
        if status == _NO_CONTEXT:
            with self.current():
                status = int(function(*arguments))
        return status

    def _require_success(self, name: str, status: int) -> None:
        if status != _SUCCESS:
            raise TransferError(f"cuda: {name}: {self._reason(status)}")

    def _reason(self, status: int) -> str:
        text = c_char_p()
        self._library.cuGetErrorString(status, byref(text))
        return f"{(text.value or b'unknown error').decode(errors='replace')} (error {status})"
