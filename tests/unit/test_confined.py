"""The guard of objects that live on one thread."""

from __future__ import annotations

import threading

import pytest

from kvcore.runtime.confined import LoopConfined


def in_another_thread(call):
    errors = []

    def body():
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    return errors


def test_the_first_user_may_go_on_and_any_other_thread_is_stopped():
    confined = LoopConfined()
    confined.check()
    confined.check()
    (error,) = in_another_thread(confined.check)
    assert isinstance(error, AssertionError)
    assert "call_soon_threadsafe" in str(error)
    confined.check()


def test_an_object_may_be_built_before_the_thread_of_its_loop_starts():
    confined = LoopConfined()
    assert in_another_thread(confined.check) == []
    with pytest.raises(AssertionError):
        confined.check()
