"""The host's memory: reused slabs, how many there may be, and the speed of the link."""

import gc

import pytest
import torch

from liger_trainer.memory import pinned_memory
from liger_trainer.memory.pinned_memory import GIB, HostCopier, PinnedMemory, host_bytes_allowed


def plain(size):
    return torch.empty(size, dtype=torch.uint8)


def test_all_of_the_room_can_be_taken():
    """Even if it is not a whole number of slabs."""
    host = PinnedMemory(1500 * 512, plain, slab=1000 * 512)
    slots = [host.take(300 * 512) for _ in range(4)]
    assert None not in slots and host.taken == host.room
    assert host.take(512) is not None, "of what is left in the first slab"
    assert PinnedMemory(512, plain).take(512) is not None


def test_slots_do_not_overlap():
    host = PinnedMemory(1 << 20, plain, slab=1 << 14)
    slots = [host.take(size) for size in (1000, 5000, 512, 9000, 20_000, 1)]
    for number, slot in enumerate(slots):
        assert slot.bytes.dtype == torch.uint8
        slot.bytes.fill_(number)
    assert [len(slot.bytes) for slot in slots] == [1000, 5000, 512, 9000, 20_000, 1]
    assert all((slot.bytes == number).all() for number, slot in enumerate(slots))
    assert host.taken == (1 << 14) + 20_480, "one slab more, as large as it takes"


def test_a_slab_is_used_again_when_all_of_it_has_come_back():
    host = PinnedMemory(1 << 20, plain, slab=1 << 14)
    first = [host.take(4096) for _ in range(4)]
    address = first[0].bytes.data_ptr()
    del first[1:]
    assert host.take(4096).bytes.data_ptr() != address
    assert host.taken == 2 << 14
    first.clear()
    gc.collect()
    assert host.take(16_384).bytes.data_ptr() == address
    assert host.taken == 2 << 14


def test_no_more_than_the_room():
    host = PinnedMemory(40_000, plain, slab=1 << 14)
    slots = [host.take(16_000) for _ in range(3)]
    assert slots[1] is not None and slots[2] is None


def test_only_slabs_out_of_use_are_freed():
    host = PinnedMemory(1 << 20, plain, slab=1 << 14)
    slots = [host.take(16_000), host.take(16_000)]
    del slots[0]
    host.release()
    assert host.taken == 1 << 14
    assert (slots[0].bytes.fill_(3) == 3).all()
    slots.clear()
    host.release()
    assert host.taken == 0


def test_running_out_of_pinned_memory_is_reported_once(caplog):
    def pin(size):
        if host.taken:
            raise RuntimeError("CUDA error: out of memory")
        return plain(size)

    host = PinnedMemory(1 << 20, pin, slab=1 << 14)
    kept = [host.take(16_000) for _ in range(3)]
    assert kept[0] is not None and kept[1] is kept[2] is None
    assert caplog.text.count("Set host_memory_budget to fewer GiB") == 1


def test_the_room(monkeypatch, tmp_path):
    class Free:
        available = 100 * GIB

    monkeypatch.setattr(pinned_memory.psutil, "virtual_memory", lambda: Free)
    monkeypatch.setattr(pinned_memory, "_CGROUP", tmp_path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert host_bytes_allowed(None) == 50 * GIB
    assert host_bytes_allowed(3) == 3 * GIB
    assert host_bytes_allowed(0) == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_bytes_allowed(None) == 12.5 * GIB
    assert host_bytes_allowed(3) == 3 * GIB, "a budget is of each process"


@pytest.mark.parametrize(
    "files, free",
    [
        ({"memory.max": 20 * GIB, "memory.current": 12 * GIB, "memory.stat": "anon 5\ninactive_file 0\n"}, 8 * GIB),
        (
            {"memory.max": 20 * GIB, "memory.current": 12 * GIB, "memory.stat": f"inactive_file {4 * GIB}\n"},
            12 * GIB,
        ),
        ({"memory.max": "max", "memory.current": 12 * GIB, "memory.stat": ""}, 100 * GIB),
        (
            {
                "memory/memory.limit_in_bytes": 20 * GIB,
                "memory/memory.usage_in_bytes": 12 * GIB,
                "memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
            },
            9 * GIB,
        ),
    ],
    ids=["second version", "with a cache", "no limit", "first version"],
)
def test_a_container_has_less(files, free, monkeypatch, tmp_path):
    class Free:
        available = 100 * GIB

    monkeypatch.setattr(pinned_memory.psutil, "virtual_memory", lambda: Free)
    monkeypatch.setattr(pinned_memory, "_CGROUP", tmp_path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(str(text))
    assert host_bytes_allowed(None) == free // 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
def test_the_link_of_a_gpu():
    transport = HostCopier(PinnedMemory(1 << 31), torch.device("cuda", torch.cuda.current_device()))
    assert 1e9 < transport.rate < 1e12
    memory = transport.host.take(1000).bytes
    assert memory.is_pinned()
    begin = transport.mark()
    torch.cuda._sleep(10**8)
    assert 0.01 < transport.seconds(begin, transport.mark()) < 1
