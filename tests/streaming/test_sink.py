"""The steps of what all processes write together, in one process; `multiprocess/` has those of several."""

import pytest

from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage.workspace import Workspace
from orbax_safetensors.streaming.sink import Sink


class Place(Workspace):
    """Records that it is begun."""

    def __init__(self, done):
        self.done = done

    def begin(self, *, resume):
        assert resume
        self.done("begin")


class Recorder(Sink):
    """Records its steps, of which one may fail."""

    path = "to"

    def __init__(self, fails=None, error=None):
        self.steps, self.fails, self.error = [], fails, error or StorageError("the disk is gone")
        self.workspace = Place(self.done)
        self.begin(resume=True)

    def done(self, step):
        self.steps.append(step)
        if step == self.fails:
            raise self.error

    def _open(self):
        self.done("open")

    def _see(self):
        self.done("see")
        return "what is there"

    def _flush(self):
        self.done("flush")

    def _finish(self):
        self.done("finish")

    def _stop(self):
        self.done("stop")

    def _release(self):
        self.done("release")


BEGINNING = ["begin", "open", "see"]
END = ["flush", "finish"]


def test_from_its_beginning_to_its_end():
    with Recorder() as sink:
        sink.commit(lambda: sink.done("last"))
    assert sink.steps == [*BEGINNING, "flush", "last", "finish", "release"]


@pytest.mark.parametrize(
    ("step", "error"), [*((step, None) for step in (*BEGINNING, *END)), ("open", ValueError("of another library"))]
)
def test_what_fails_ends_it_and_lets_others_begin(step, error):
    steps = []

    class Failing(Recorder):
        def done(self, step):
            steps.append(step)
            super().done(step)

    def write():
        with Failing(step, error) as sink:
            sink.commit()

    with pytest.raises(StorageError, match="of another library" if error else "the disk is gone"):
        write()
    whole = [*BEGINNING, *END]
    assert steps == [*whole[: whole.index(step) + 1], "release"]


@pytest.mark.parametrize("error", [ValueError("elsewhere"), KeyboardInterrupt()])
@pytest.mark.parametrize("fails", [None, "stop"])
def test_a_block_that_fails_gives_up(error, fails):
    sink = Recorder(fails)
    with pytest.raises(type(error)) as caught, sink:
        raise error
    assert caught.value is error
    assert sink.steps == [*BEGINNING, "stop", "release"]


def test_a_block_that_ends_without_commit_gives_up():
    with Recorder() as sink:
        pass
    assert sink.steps == [*BEGINNING, "stop", "release"]
