"""The thread of a rank's saves: order, survival, and an end."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from trainer_sidecar.train.background import Background, nothing_begun


def test_jobs_are_done_one_after_the_other_in_one_thread() -> None:
    background, seen = Background("rtj-test"), list[tuple[int, int]]()
    for number in range(5):
        over = background.begin(lambda number=number: seen.append((number, threading.get_ident())))  # type: ignore[misc]
    assert over.wait(30)
    assert [number for number, _ in seen] == [0, 1, 2, 3, 4]
    assert len({thread for _, thread in seen}) == 1


def test_a_job_that_raises_is_over_and_logged_and_the_next_one_is_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    background = Background("rtj-test")

    def broken() -> None:
        raise ValueError("no")

    assert background.begin(broken).wait(30)
    assert background.begin(lambda: None).wait(30)
    assert "a job of this rank's saves failed" in caplog.text


def test_nothing_is_held_of_a_job_that_is_over_and_the_thread_ends_with_its_object() -> None:
    """A session that is let go in a process that goes on keeps neither its socket nor a thread."""

    class Session:
        def job(self) -> None: ...

    background, session = Background("rtj-test"), Session()
    held, thread = weakref.ref(session), background._thread
    assert background.begin(session.job).wait(30)
    assert background.begin(lambda: None).wait(30)
    del session
    gc.collect()
    assert held() is None
    del background
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_what_has_not_begun_is_not_waited_for() -> None:
    assert nothing_begun().is_set()
