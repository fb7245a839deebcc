"""What kvferry's rooms log goes where vLLM's own lines go, unless an operator has set them up otherwise."""

import io
import logging
from collections.abc import Iterator

import pytest

from kvferry.vllm.connector import log_as_vllm_does

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")


@pytest.fixture
def ours() -> Iterator[logging.Logger]:
    """The logger of all rooms as it is before a connector is made, beside vLLM's with one handler and a level."""
    loggers = [logging.getLogger(name) for name in ("kvferry", "vllm")]
    kept = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    ours, theirs = loggers
    ours.handlers, ours.propagate = [], True
    ours.setLevel(logging.NOTSET)
    theirs.handlers, theirs.propagate = [logging.StreamHandler(io.StringIO())], False
    theirs.setLevel(logging.WARNING)
    yield ours
    for logger, handlers, level, propagate in kept:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def theirs(ours: logging.Logger) -> logging.Logger:
    return logging.getLogger("vllm")


def written(logger: logging.Logger) -> str:
    handler = logger.handlers[0]  # pytest listens behind it
    assert isinstance(handler, logging.StreamHandler)
    return str(handler.stream.getvalue())


def test_our_lines_go_where_vllms_go_at_its_level(ours: logging.Logger, theirs: logging.Logger) -> None:
    log_as_vllm_does()
    assert (ours.handlers, ours.level, ours.propagate) == (theirs.handlers, logging.WARNING, False)
    room = logging.getLogger("kvferry.runtime.somewhere")
    room.info("not at this level")
    room.warning("a peer is slow")
    assert written(theirs) == "a peer is slow\n"
    ours.handlers.clear()
    assert theirs.handlers, "the list is its own: an operator who changes one does not change both"


def test_a_second_connector_of_the_process_changes_nothing(ours: logging.Logger, theirs: logging.Logger) -> None:
    log_as_vllm_does()
    theirs.setLevel(logging.DEBUG)
    log_as_vllm_does()
    assert ours.level == logging.WARNING
    logging.getLogger("kvferry.runtime.somewhere").warning("once")
    assert written(theirs) == "once\n"


def test_a_level_that_vllm_has_from_the_root_counts(ours: logging.Logger, theirs: logging.Logger) -> None:
    theirs.setLevel(logging.NOTSET)
    log_as_vllm_does()
    assert ours.level == logging.getLogger().getEffectiveLevel()


@pytest.mark.parametrize("propagate", [True, False])
def test_handlers_of_an_operator_stay(ours: logging.Logger, theirs: logging.Logger, *, propagate: bool) -> None:
    own = logging.StreamHandler(io.StringIO())
    ours.handlers, ours.propagate = [own], propagate
    ours.setLevel(logging.ERROR)
    log_as_vllm_does()
    assert (ours.handlers, ours.level, ours.propagate) == ([own], logging.ERROR, propagate)
    logging.getLogger("kvferry.runtime.somewhere").error("a fault")
    assert own.stream.getvalue() == "a fault\n"
    assert written(theirs) == ""


def test_a_level_of_an_operator_stays(ours: logging.Logger, theirs: logging.Logger) -> None:
    """Debug lines of kvferry alone, in vLLM's log: a level is all that the operator sets."""
    ours.setLevel(logging.DEBUG)
    log_as_vllm_does()
    assert (ours.handlers, ours.level) == (theirs.handlers, logging.DEBUG)


def test_where_vllm_sets_up_no_log_nothing_is_changed(ours: logging.Logger, theirs: logging.Logger) -> None:
    """As with ``VLLM_CONFIGURE_LOGGING=0``: all goes to the root, as the operator wants it."""
    theirs.handlers = []
    log_as_vllm_does()
    assert (ours.handlers, ours.level, ours.propagate) == ([], logging.NOTSET, True)
