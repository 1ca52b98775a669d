from __future__ import annotations

import pytest
from regions import region

from radixshmem import ComponentType, Geometry, SlotStore
from radixshmem.names import default_data_name

torch = pytest.importorskip("torch")


def test_pool_tensor_is_a_view_of_the_pool() -> None:
    from radixshmem.torch import pool_tensor

    with region(Geometry(16, 4000), data_bytes=1 << 20) as name:
        store = SlotStore.attach(default_data_name(name))
        tensor = pool_tensor(store, ComponentType.FULL, torch.float16)
        assert tensor.shape == (256, 2048)
        tensor[3, 5] = 1.5
        assert store.array(ComponentType.FULL)[3, 10:12].tobytes() == b"\x00\x3e"
        store.slot_view(4)[:2] = b"\x00\x3e"
        assert tensor[4, 0] == 1.5
        store.close()
        assert tensor[3, 5] == 1.5


def test_a_dtype_that_does_not_fit_is_refused() -> None:
    from radixshmem.torch import pool_tensor

    with region(Geometry(16, 1002, slot_align=2), data_bytes=1 << 16) as name:
        store = SlotStore.attach(default_data_name(name))
        with pytest.raises(ValueError, match=r"dtype.*1002 bytes"):
            pool_tensor(store, ComponentType.FULL, torch.float32)
        assert pool_tensor(store, ComponentType.FULL, torch.int16).shape == (65, 501)
        store.close()
