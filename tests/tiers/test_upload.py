"""Uploads: the bytes arrive, the host does not wait, and values can be overwritten before the copy has ended."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache.tiers.device import known_device
from hicache.tiers.upload import upload


def test_on_the_cpu_the_array_is_the_tensor() -> None:
    values = np.arange(6, dtype=np.int32).reshape(2, 3)
    uploaded = upload(values, torch.device("cpu"))
    assert uploaded.dtype == torch.int32 and uploaded.data_ptr() == values.ctypes.data


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stream", [None, 1])
def test_uploads_to_cuda_do_not_wait_for_a_stalled_stream(stream: int | None) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    random = np.random.default_rng(0)
    arrays = [random.integers(0, 1 << 40, (3, size)) for size in (0, 1, 17, 1000, 5000) for _ in range(4)]
    pinned = [torch.from_numpy(array).pin_memory() for array in arrays]
    del pinned  # torch keeps the memory for the uploads
    with torch.cuda.stream(None if stream is None else torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
            stalled = torch.cuda.current_stream(device).record_event()
            uploads = []
            for array in arrays:
                given = array.T.copy().T
                uploads.append(upload(given, device))
                given[:] = 0
            assert not stalled.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for _ in range(3):  # larger arrays, for which new memory is pinned
            arrays.append(random.integers(0, 1 << 40, 1 << 16))
            arrays.append(random.integers(0, 1 << 40, (1 << 17) + 1))
            uploads += [upload(array, device) for array in arrays[-2:]]
        for array, uploaded in zip(arrays, uploads, strict=True):
            np.testing.assert_array_equal(array, uploaded.cpu().numpy())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_without_a_number_becomes_the_number_of_the_current_device() -> None:
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            assert known_device("cuda") == known_device(torch.device("cuda")) == torch.device("cuda", index)
    assert known_device("cuda:0").index == 0
