"""Every way a run can end, and what stays of it."""

import itertools

import pytest

from generative_recommenders.train.outcome import (
    FAILED,
    OK,
    USER_ERROR,
    Broken,
    Finished,
    Leaving,
    NothingToDo,
    NotWritten,
    what_stays,
)

BROKEN = Broken("no", FAILED)


@pytest.mark.parametrize(
    "outcome, resuming, begun, named, wanted",
    [
        (Finished(None), False, True, False, Leaving.WHOLE),
        (Finished("too low"), True, True, True, Leaving.WHOLE),
        (NothingToDo("done"), True, False, True, Leaving.UNTOUCHED),
        (BROKEN, False, True, False, Leaving.WHOLE),
        (BROKEN, True, True, True, Leaving.WHOLE),
        (BROKEN, True, False, True, Leaving.UNTOUCHED),
        (BROKEN, False, False, True, Leaving.RESULT),
        (BROKEN, False, False, False, Leaving.NOTHING),
        (Broken("no", FAILED, kept_traceback=True), False, False, False, Leaving.RESULT),
    ],
)
def test_what_stays(outcome, resuming, begun, named, wanted):
    assert what_stays(outcome, placed=True, resuming=resuming, begun=begun, named=named) is wanted


def test_without_a_folder_there_is_a_note_at_most():
    for resuming, named in itertools.product((True, False), repeat=2):
        kept = what_stays(BROKEN, placed=False, resuming=resuming, begun=False, named=named)
        assert kept is Leaving.NOTE


def test_exit_statuses():
    assert Finished(None).exit_status == NothingToDo("done").exit_status == OK
    assert Finished("too low").exit_status == FAILED
    assert NotWritten(Finished(None)).exit_status == NotWritten(Finished("too low")).exit_status == FAILED
    assert NotWritten(Broken("wrong option", USER_ERROR)).exit_status == USER_ERROR
