"""Log records: format, reading back, merging, redaction."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from framework import RunPlan
from framework.errors import UsageError
from framework.log_merge import GlobalLog, Merge, complete, label
from framework.log_records import LAUNCHER, LogLine, RankLog, Tail, log_file, plain
from framework.plan import Failure, MeshSpec
from framework.redaction import Redactor, is_secret, redacted
from framework_plugins.logs.rank_zero import Console, RankZero


def record(text: str, at: float, level: int = logging.INFO, name: str = "app") -> logging.LogRecord:
    made = logging.LogRecord(name, level, "", 0, text, None, None)
    made.created = at
    return made


def write(run_dir: Path, rank: int, *said: tuple[float, str], level: int = logging.INFO) -> None:
    log = RankLog(log_file(run_dir, rank), Redactor({}))
    for at, text in said:
        log.emit(record(text, at, level))
    log.close()


def global_lines(run_dir: Path) -> list[str]:
    """Lines of global.log without their times."""
    return [line.partition(" ")[2] for line in (run_dir / "global.log").read_text().splitlines()]


def test_a_record_is_read_back_as_it_was_said(tmp_path: Path) -> None:
    path = tmp_path / "rank_3.log"
    log = RankLog(path, Redactor({}))
    text = "first\n2026-01-01T00:00:00.000000+0000 INFO fake header\nüñ \t end"
    log.emit(record(text, 1_700_000_000.123456, logging.WARNING, "my logger"))
    log.emit(record("second", 1_700_000_001.0))
    log.close()
    lines = list(Tail(path, 3).drain())
    assert [line.text for line in lines] == [text.replace("\n", "\n\t"), "second"]
    assert lines[0].time == pytest.approx(1_700_000_000.123456, abs=1e-6)
    assert (lines[0].level, lines[0].logger, lines[0].rank) == ("WARNING", "my_logger", 3)


def test_tracebacks_stay_with_their_record(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.log"
    log = RankLog(path, Redactor({}))
    try:
        raise ValueError("boom")
    except ValueError:
        made = record("failed", 1.0, logging.ERROR)
        made.exc_info = sys.exc_info()
        log.emit(made)
    log.close()
    (line,) = Tail(path, 0).drain()
    assert line.text.startswith("failed\n\tTraceback")
    assert line.text.endswith("ValueError: boom")


def test_control_characters_never_reach_a_file() -> None:
    assert plain("\x1b[31mred\x1b[0m\r\x07 \x1b]0;title\x07ok\n\ttab") == "red ok\n\ttab"


def test_a_reader_waits_for_the_rest_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.log"
    tail = Tail(path, 0)
    assert tail.read() == []
    head = "2026-01-01T00:00:00.000000+0000 INFO app "
    path.write_text(f"{head}one\n{head}two")
    assert [line.text for line in tail.read()] == ["one"]
    with path.open("a") as file:
        file.write(" and more\n\tand a line\n")
    assert tail.read() == []
    assert [line.text for line in tail.read()] == ["two and more\n\tand a line"]


def test_a_cut_line_does_not_spoil_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.log"
    path.write_text("2026-01-01T00:00:00.000000+0000 INFO app cut he")
    log = RankLog(path, Redactor({}))
    log.emit(record("whole", 1_800_000_000.0))
    log.close()
    assert [line.text for line in Tail(path, 0).drain()] == ["cut he", "whole"]


def test_whole_lines_from_many_threads(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.log"
    log = RankLog(path, Redactor({}))
    threads = [
        threading.Thread(target=lambda i=i: [log.handle(record(f"{i} " + "x" * 5000, 1.0)) for _ in range(50)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    lines = list(Tail(path, 0).drain())
    assert len(lines) == 200
    assert {len(line.text) for line in lines} == {5002}


@pytest.mark.parametrize(
    ("ranks", "text"),
    [({1}, "[rank 1]"), ({0, 1, 2, 3}, "[ranks 0-3]"), ({0, 1, 3}, "[ranks 0-1,3]"), ({LAUNCHER}, "[launcher]")],
)
def test_labels(ranks: set[int], text: str) -> None:
    assert label(ranks) == text


def test_identical_lines_once_with_their_ranks_in_order_of_time(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, (100 + rank / 10, "hello"), (101, f"only {rank}"))
    write(tmp_path, 1, (99, "early"))
    complete(tmp_path, 4)
    assert global_lines(tmp_path) == [
        "INFO app [rank 1] early",
        "INFO app [ranks 0-3] hello",
        *(f"INFO app [rank {rank}] only {rank}" for rank in range(4)),
    ]


def test_a_line_said_twice_by_each_rank_stands_there_twice(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, (100 + rank, "step"), (102 + rank, "step"))
    write(tmp_path, 1, (104, "step"))
    complete(tmp_path, 2)
    assert global_lines(tmp_path) == ["INFO app [ranks 0-1] step"] * 2 + ["INFO app [rank 1] step"]


def test_two_starts_of_a_run_are_not_joined(tmp_path: Path) -> None:
    for rank, attempt in ((0, 0), (1, 1)):
        log = RankLog(log_file(tmp_path, rank), Redactor({}))
        log.emit(record(f"attempt {attempt} started on here", 100, name="framework.logs"))
        log.emit(record("restored", 101))
        log.close()
    complete(tmp_path, 2)
    assert [line for line in global_lines(tmp_path) if "restored" in line] == [
        "INFO app [rank 0] restored",
        "INFO app [rank 1] restored",
    ]


def test_take_waits_for_slow_ranks_but_not_for_ever() -> None:
    merge = Merge(2)
    merge.add(LogLine(10.0, "t", "INFO", "app", "a", 0, 0))
    merge.add(LogLine(11.0, "t", "INFO", "app", "b", 0, 0))
    merge.add(LogLine(11.5, "t", "INFO", "app", "b", 1, 0))
    assert list(merge.take(9.0, early=True)) == []  # b is whole, but a stands before it
    assert [said.line.text for said in merge.take(10.5, early=True)] == ["a", "b"]
    assert len(merge) == 0


def test_flush_at_entries_or_seconds(tmp_path: Path) -> None:
    now = time.time()
    merged = GlobalLog(tmp_path, 2, flush_entries=4, flush_seconds=30)
    write(tmp_path, 0, *((now - 2, f"line {n}") for n in range(3)))
    assert [*merged.poll(), *merged.poll()] == []
    write(tmp_path, 1, (now - 2, "line 3"))
    assert len([*merged.poll(), *merged.poll()]) == 4, "four entries wait: written"
    write(tmp_path, 1, (now - 31, "old"))
    assert len([*merged.poll(), *merged.poll()]) == 1, "one waits since 31 s: written"
    write(tmp_path, 1, (now - 1, "trouble"), level=logging.WARNING)
    assert len([*merged.poll(), *merged.poll()]) == 1, "a warning doesn't wait"
    write(tmp_path, 0, (now, "last"))
    assert [said.line.text for said in merged.poll(final=True)] == ["last"]
    assert len(global_lines(tmp_path)) == 7


def test_complete_tells_which_warnings_nobody_has_seen(tmp_path: Path) -> None:
    write(tmp_path, 0, (100, "known"), level=logging.WARNING)
    assert [said.line.text for said in complete(tmp_path, 2)] == ["known"]
    write(tmp_path, 1, (101, "new"), level=logging.ERROR)
    write(tmp_path, 1, (102, "not loud"))
    assert [said.line.text for said in complete(tmp_path, 2)] == ["new"]
    assert len(global_lines(tmp_path)) == 3


def test_a_new_start_goes_on_where_the_last_one_was_cut(tmp_path: Path) -> None:
    write(tmp_path, 0, (100, "from attempt 0"))
    (tmp_path / "global.log").write_text("half a li")
    GlobalLog(tmp_path, 1, 128, 5).poll(final=True)
    write(tmp_path, 0, (200, "from attempt 1"))
    GlobalLog(tmp_path, 1, 128, 5).poll(final=True)
    assert global_lines(tmp_path) == ["INFO app [rank 0] from attempt 0", "INFO app [rank 0] from attempt 1"]


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "WANDB_API_KEY", "KEYS"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "PATH"])
def test_names_of_no_secrets(name: str) -> None:
    assert not is_secret(name)


def test_secrets_are_masked_in_text_and_in_the_environment(tmp_path: Path) -> None:
    environment = {"HF_TOKEN": "hf_abcdef", "URL": "https://hf_abcdef@host", "HF_TOKEN_LONG": "hf_abcdefgh", "KEY": "1"}
    assert redacted(environment) == {"HF_TOKEN": "***", "URL": "https://***@host", "HF_TOKEN_LONG": "***", "KEY": "***"}
    redact = Redactor(environment)
    assert redact("hf_abcdefgh and hf_abcdef in 1") == "*** and *** in 1"
    log = RankLog(tmp_path / "rank_0.log", redact)
    try:
        raise ValueError("login with hf_abcdef failed")
    except ValueError:
        made = record("sent hf_abcdef", 1.0)
        made.exc_info = sys.exc_info()
        log.emit(made)
    log.close()
    assert "hf_abcdef" not in (tmp_path / "rank_0.log").read_text()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("level", "loud"), ("console_level", 10), ("flush_entries", 0), ("flush_seconds", 0.0), ("secret_names", "(")],
)
def test_bad_settings_are_refused_by_name(setting: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"logs\.{setting}="):
        RankZero(**{setting: value})


def test_console_shows_info_once_and_warnings_with_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(logging.INFO)
    for rank in (1, 0):
        console.offer({rank}, logging.INFO, "app", "hello", 0.0)
    console.offer({1}, logging.ERROR, "app", "rank-one-only", 0.0)
    console.offer({1}, logging.DEBUG, "app", "quiet", 0.0)
    console.offer({1}, logging.INFO, "app", "hello", 0.0)
    shown = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["INFO app: hello", "ERROR [rank 1] app: rank-one-only", "INFO app: hello"]


def test_one_librarys_advice_to_another_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(logging.INFO)
    advice = "FutureWarning: isinstance is deprecated\n  return isinstance(x)"
    console.offer({0}, logging.WARNING, "py.warnings", f"/env/lightning/pytorch/tree.py:21: {advice}", 0.0)
    assert capsys.readouterr().err == ""
    console.offer({0}, logging.WARNING, "py.warnings", f"/home/me/model.py:21: {advice}", 0.0)
    assert "model.py:21" in capsys.readouterr().err


def test_session_takes_over_and_gives_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret-value")
    root, lightning = logging.getLogger(), logging.getLogger("lightning.pytorch")
    console = io.StringIO()
    monkeypatch.setattr(sys, "stderr", console)
    own = logging.StreamHandler(sys.stderr)
    lightning.addHandler(own)
    monkeypatch.setattr(lightning, "level", logging.INFO)
    monkeypatch.setattr(lightning, "propagate", False)
    before = (root.level, list(root.handlers))
    plugin = RankZero(flush_seconds=0.2)
    plan = RunPlan(run_id="x", run_dir=str(tmp_path), mesh=MeshSpec(dp_replicate=2))
    plugin.on_worker_start(plan, 0)
    lightning.info("from lightning")
    lightning.warning("trouble in lightning")
    logging.getLogger("user").warning("uses \x1b[1ms3cret-value")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("deprecated thing", UserWarning, stacklevel=1)
    plugin.on_run_end(plan, RuntimeError("the end"))
    assert (root.level, list(root.handlers)) == before
    assert own in lightning.handlers
    lightning.removeHandler(own)
    text = (tmp_path / "global.log").read_text()
    for expected in ("[rank 0] from lightning", "[rank 0] uses ***", "deprecated thing", "RuntimeError: the end"):
        assert expected in text
    assert console.getvalue().count("from lightning") == 0, "libraries' INFO lines go to the files only"
    assert console.getvalue().count("trouble in lightning") == 1
    assert "the end" not in console.getvalue(), "how a rank ended is the launcher's to tell"
    assert "s3cret" not in text + console.getvalue()
    assert "\x1b" not in text + console.getvalue()


def test_launcher_completes_what_rank_zero_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = RunPlan(run_id="x", run_dir=str(tmp_path), mesh=MeshSpec(dp_replicate=2))
    write(tmp_path, 0, (100, "hello"))
    write(tmp_path, 1, (100.5, "hello"), (101, "last words"))
    write(tmp_path, 1, (102, "disk full"), level=logging.ERROR)
    plugin = RankZero()
    plugin.on_worker_failure(plan, Failure(1, "killed by SIGKILL", -9, 103.0), 0)
    plugin.on_run_end(plan, None)
    lines = global_lines(tmp_path)
    assert lines[:3] == ["INFO app [ranks 0-1] hello", "INFO app [rank 1] last words", "ERROR app [rank 1] disk full"]
    assert lines[3] == "ERROR framework.launch [launcher] attempt 0 ended: rank 1 was killed by SIGKILL"
    assert capsys.readouterr().err.count("ERROR [rank 1] app: disk full") == 1
