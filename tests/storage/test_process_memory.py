"""The memory that this process holds: freed memory goes back to the system, its most, the collector pauses."""

import gc
import io

from orbax_safetensors.storage import process_memory
from orbax_safetensors.storage.process_memory import no_collection


def test_the_most_memory_is_that_of_this_program_alone(monkeypatch):
    """Not of a larger one that has started it, which is what `getrusage` would say."""
    status = b"VmPeak:\t 9000 kB\nVmHWM:\t    5 kB\nVmRSS:\t    4 kB\n"
    monkeypatch.setattr(process_memory, "open", lambda path, mode: io.BytesIO(status), raising=False)
    assert process_memory.peak_bytes() == 5 * 1024


def test_freed_memory_is_given_back(monkeypatch):
    asked = []
    monkeypatch.setattr(process_memory, "_TRIM", asked.append)
    process_memory.trim()
    assert asked == [0]


def test_a_c_library_that_gives_nothing_back(monkeypatch):
    monkeypatch.setattr(process_memory, "_TRIM", None)
    process_memory.trim()


def test_what_exists_after_a_pause_of_the_collector_counts_as_old():
    thresholds = gc.get_threshold()
    gc.set_threshold(0)  # no collection makes them old
    try:
        with no_collection():
            assert not gc.isenabled()
            made = [[number] for number in range(10)]
        assert gc.isenabled()
        young = {id(thing) for generation in (0, 1) for thing in gc.get_objects(generation)}
        assert young.isdisjoint(map(id, made))
        assert gc.get_freeze_count() == 0
    finally:
        gc.set_threshold(*thresholds)


def test_a_pause_of_the_collector_thaws_nothing_that_a_caller_has_frozen():
    made = [[number] for number in range(10)]
    gc.freeze()
    try:
        with no_collection():
            pass
        thawed = {id(thing) for thing in gc.get_objects()}  # what is frozen is not among these; it may still die
        assert thawed.isdisjoint(map(id, made))
    finally:
        gc.unfreeze()
