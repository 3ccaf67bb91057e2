"""The remote tier and its catalogue: over fsspec, against the S3 protocol (moto's server) and plain folders."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from framework import checkpoint_files as files
from framework.cli import main
from framework.errors import UsageError
from framework.plan import RunPlan
from framework.versions import Clock
from framework_plugins.checkpoint import remote, tiers
from framework_plugins.checkpoint.copier import Remote
from framework_plugins.checkpoint.dcp import DCP
from framework_plugins.checkpoint.remote import RemoteError
from framework_plugins.checkpoint.storage import file_name
from framework_plugins.checkpoint.store import ShardedStore

TENSORS = {"model.a": torch.arange(6.0), "model.b": torch.ones(3, dtype=torch.float64)}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """URL of a bucket on a server of this machine."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "secret",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/storage"
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


def save(run: Path, step: int) -> Path:
    path = files.folder_of(run) / files.step_name(step)
    ShardedStore().save(str(path), TENSORS, {"step": step, "clock": Clock(1, (step,)).to_dict()})
    return path


def opened(url: str, run: Path, keep: int = 2, **best: Any) -> Remote:
    run.mkdir(exist_ok=True)
    return Remote(url, keep, RunPlan(run_id=run.name, run_dir=str(run)), **best)


def settled(to: Remote) -> None:
    end = time.monotonic() + 30
    while not to.idle:
        assert time.monotonic() < end
        time.sleep(0.01)


def copied(to: Remote, *paths: Path) -> None:
    for path in paths:
        to.send(path)
        settled(to)


def scored(to: Remote, path: Path, value: float) -> None:
    """Score a checkpoint on disk, and tell the scores there."""
    files.write_score(path, "loss", to.better, value)
    to.scores(files.by_score(files.marks(path.parent)[0], to.better))
    settled(to)


def there(to: Remote) -> dict[int, str | None]:
    """Return step -> score of what the catalogue has, which is what the storage has."""
    rows = remote.newest(to.url, to.name)
    system, root = fsspec.core.url_to_fs(to.url)
    system.invalidate_cache()
    stored = sorted(Path(name).name for name in system.ls(f"{root}/{to.name}", detail=False))
    assert stored == sorted(row["name"] for row in rows)
    return {row["step"]: row["score"] for row in reversed(rows)}


def loaded(path: str | Path) -> bool:
    wanted = {name: torch.full_like(tensor, 7) for name, tensor in TENSORS.items()}
    ShardedStore().load(str(path), wanted, ("model.",))
    return all(torch.equal(wanted[name], tensor) for name, tensor in TENSORS.items())


def test_another_cluster_finds_the_newest(url: str, tmp_path: Path) -> None:
    run = tmp_path / "mine"
    to = opened(url, run)
    copied(to, *(save(run, step) for step in (2, 4, 6)))
    assert [row["step"] for row in remote.newest(url, to.name)] == [6, 4], "remote_keep=2"
    for asked in (url, f"{url}/{to.name}", f"{url}/{to.name}/step-000006"):
        found = remote.find(asked, str(tmp_path / f"elsewhere{len(asked)}"))
        assert (found.step, found.tier) == (6, "remote")
        assert loaded(found.path)
    assert remote.find(f"{url}/{to.name}/step-000004", str(tmp_path / "elsewhere")).step == 4


def test_a_lost_disk_is_had_again_and_a_newer_one_on_disk_counts(url: str, tmp_path: Path) -> None:
    run, settings = tmp_path / "mine", DCP(remote=url)
    copied(opened(url, run), save(run, 4))
    found = tiers.newest(str(run), settings)
    assert found is not None
    assert (found.tier, found.step) == ("disk", 4), "of equal ones the fastest tier's"
    save(run, 6)
    assert tiers.newest(str(run), settings).step == 6  # type: ignore[union-attr]
    for step in (4, 6):
        files.remove(files.folder_of(run) / files.step_name(step))
    found = tiers.newest(str(run), settings)
    assert found is not None
    assert (found.tier, found.step) == ("remote", 4)
    assert loaded(found.path)


def test_one_that_is_damaged_far_away_is_named_and_the_one_before_taken(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "mine"
    to = opened(url, run)
    copied(to, save(run, 2), save(run, 4))
    system, root = fsspec.core.url_to_fs(url)
    system.pipe_file(f"{root}/{to.name}/step-000004/{files.STATE}", b'{"step": 5}')
    assert remote.find(url, str(tmp_path / "elsewhere")).step == 2
    assert "state.json has 11 bytes" in caplog.text


def test_a_copy_that_was_cut_off_is_not_in_the_catalogue(url: str, tmp_path: Path) -> None:
    """The mark is written last, the catalogue after it: a kill in between leaves what was there before."""
    run = tmp_path / "mine"
    to = opened(url, run)
    copied(to, save(run, 2))
    system, root = fsspec.core.url_to_fs(url)
    path = save(run, 4)
    system.makedirs(f"{root}/{to.name}/{path.name}", exist_ok=True)
    system.put_file(str(path / files.INDEX), f"{root}/{to.name}/{path.name}/{files.INDEX}")
    assert remote.find(url, str(tmp_path / "elsewhere")).step == 2
    opened(url, run)  # the next life tidies up
    system.invalidate_cache()
    assert not system.exists(f"{root}/{to.name}/{path.name}")
    assert remote.find(url, str(tmp_path / "elsewhere")).step == 2


@pytest.mark.parametrize(("better", "kept"), [("min", {2: "0.5", 8: None}), ("max", {4: "0.9", 8: None})])
def test_the_best_is_kept_besides_the_newest(url: str, tmp_path: Path, better: str, kept: dict[int, str]) -> None:
    run = tmp_path / "mine"
    to = opened(url, run, 1, top_k=1, better=better)
    for step, value in ((2, 0.5), (4, 0.9), (6, 0.7)):
        path = save(run, step)
        copied(to, path)
        scored(to, path, value)  # later than it was copied
    assert there(to).keys() == {*kept, 6} - {8}
    copied(to, save(run, 8))
    assert there(to) == kept
    again = opened(url, run, 1, top_k=1, better=better)
    assert there(again) == kept, "the next life has the scores from the storage"
    copied(again, save(run, 10))
    assert there(again) == {**{step: score for step, score in kept.items() if step != 8}, 10: None}


def test_a_best_one_that_was_passed_over_is_copied(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Copies come in slower than checkpoints: the newest goes first, and what is best on disk after it."""
    run = tmp_path / "mine"
    to = opened(url, run, 1, top_k=1)
    best, newest = save(run, 2), save(run, 4)
    copied(to, newest)
    scored(to, best, 0.5)
    assert there(to) == {2: "0.5", 4: None}
    for step in (2, 4):
        files.remove(files.folder_of(run) / files.step_name(step))
    worse = save(run, 6)
    copied(to, worse)
    scored(to, worse, 0.9)
    copied(to, save(run, 8))
    assert there(to) == {2: "0.5", 8: None}, "a disk that lost its best has another best"
    with caplog.at_level("INFO"):
        scored(to, worse, 0.9)
    assert there(to) == {2: "0.5", 8: None}
    assert "step-000006 is in" not in caplog.text, "nor is it copied to be deleted"


def test_none_is_deleted_where_that_is_asked_for(url: str, tmp_path: Path) -> None:
    run = tmp_path / "mine"
    to = opened(url, run, 1, top_k=-1)
    copied(to, *(save(run, step) for step in (2, 4, 6)))
    assert there(to) == {2: None, 4: None, 6: None}


def test_what_was_fetched_is_forgotten(url: str, tmp_path: Path) -> None:
    to = opened(url, tmp_path / "mine")
    copied(to, save(tmp_path / "mine", 2))
    run = str(tmp_path / "elsewhere")
    path = Path(remote.find(url, run).path)
    (path.parent / ".step-000004.0a1b2c3d.tmp").mkdir()  # of a fetch that was killed
    found = remote.copies(run)
    remote.forget(found)
    assert len(found) == 2
    assert not list(path.parent.glob("*step*"))
    assert loaded(remote.find(url, run).path), "it can be had again"


def test_what_is_on_its_way_is_needed(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    to = opened(f"file://{tmp_path}/storage", run)
    path = save(run, 2)
    with to._wake:  # the thread can't begin
        to._next = path
        assert to.needed == {path}
        to._wake.notify_all()
    end = time.monotonic() + 30
    while to.needed:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_storage_that_fails_is_told_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "mine"
    to = opened(f"file://{tmp_path}/storage", run)
    (tmp_path / "storage").mkdir(exist_ok=True)
    (tmp_path / "storage" / to.name).write_text("no folder")
    copied(to, save(run, 2))
    assert "step-000002 isn't in file://" in caplog.text
    assert remote.newest(f"file://{tmp_path}/storage", to.name) == []


def test_of_several_runs_one_must_be_named(url: str, tmp_path: Path) -> None:
    names = []
    for name in ("one", "other"):
        to = opened(url, tmp_path / name)
        copied(to, save(tmp_path / name, 2))
        names.append(to.name)
    with pytest.raises(UsageError, match=rf"several runs: {names[0]}, {names[1]}; type ckpt_path=.*/<run>"):
        remote.find(url, str(tmp_path / "elsewhere"))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    nothing = f"file://{tmp_path}/nothing"
    with pytest.raises(UsageError, match=rf"no catalogue of runs\. Type .*catalogue {nothing}.*or ckpt_path=null"):
        remote.find(nothing, str(tmp_path))
    with pytest.raises(UsageError, match=rf"no such checkpoint; `python -m framework catalogue {nothing}` shows"):
        remote.find(f"{nothing}/run-0a1b2c3d", str(tmp_path))
    to = opened(f"file://{tmp_path}/storage", tmp_path / "mine")
    copied(to, save(tmp_path / "mine", 2))
    with pytest.raises(UsageError, match="no such checkpoint; of this run it has step-000002"):
        remote.find(f"{to.url}/{to.name}/step-000004", str(tmp_path))
    with pytest.raises(UsageError, match="can't be opened"):
        remote.find("nonsense://bucket", str(tmp_path))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(RemoteError, match=r"(Reading|Writing) the catalogue of .*/file failed"):
        opened(f"file://{tmp_path}/file", tmp_path / "mine")  # at the start of a run, not at its first save


def test_an_entry_that_was_tampered_with_is_left_out(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "mine"
    to = opened(url, run)
    copied(to, save(run, 2))
    system, root = fsspec.core.url_to_fs(url)
    at = f"{root}/{remote.CATALOGUE}/{to.name}.json"
    system.pipe_file(at, system.cat_file(at).replace(b'"step": 2', b'"step": 9'))
    assert remote.entries(url) == {}
    assert "is left out of the catalogue" in caplog.text


def test_an_unreadable_catalogue_loses_nothing(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "mine"
    to = opened(url, run)
    copied(to, save(run, 2), save(run, 4))
    system, root = fsspec.core.url_to_fs(url)
    system.pipe_file(f"{root}/{remote.CATALOGUE}/{to.name}.json", b"nonsense")
    again = opened(url, run)
    assert again.name == to.name
    assert [row["step"] for row in remote.newest(url, to.name)] == [4, 2]
    assert loaded(remote.find(url, str(tmp_path / "elsewhere")).path)


def test_one_that_rotted_is_fetched_once_and_an_older_one_taken(url: str, tmp_path: Path) -> None:
    """Rotten tensors are found only when they are read; whoever read them marks what was fetched."""
    run, settings = tmp_path / "mine", DCP(remote=url)
    on_disk = save(run, 2)
    rotten = save(run, 4)
    content = bytearray((rotten / file_name(0)).read_bytes())
    content[-1] ^= 1
    (rotten / file_name(0)).write_bytes(content)
    copied(opened(url, run), rotten)
    files.mark_damaged(rotten, "a bit has flipped")
    found = tiers.newest(str(run), settings)
    assert found is not None
    assert (found.tier, found.step) == ("remote", 4)
    with pytest.raises(files.DamagedError, match="aren't those that were written"):
        loaded(found.path)
    files.mark_damaged(Path(found.path), "a bit has flipped")
    found = tiers.newest(str(run), settings)
    assert found is not None
    assert (found.tier, found.path) == ("disk", str(on_disk))


def test_a_copied_folder_has_a_name_of_its_own(tmp_path: Path) -> None:
    run, url = tmp_path / "mine", f"file://{tmp_path}/storage"
    to = opened(url, run)
    copied(to, save(run, 2))
    shutil.copytree(run, tmp_path / "copy")
    assert remote.name_of(str(run)) == to.name
    assert remote.name_of(str(tmp_path / "copy")) is None
    other = opened(url, tmp_path / "copy")
    assert other.name != to.name
    assert [row["step"] for row in remote.newest(url, to.name)] == [2]


def test_names_from_far_away_stay_in_the_folder(url: str, tmp_path: Path) -> None:
    """A catalogue is somebody else's text: no name in it leads out of the run's folder."""
    run = tmp_path / "mine"
    to = opened(url, run)
    copied(to, save(run, 2))
    system, root = fsspec.core.url_to_fs(url)
    at = f"{root}/{remote.CATALOGUE}/{to.name}.json"
    entry: dict[str, Any] = files.unsealed_bytes(system.cat_file(at))
    entry["checkpoints"][0]["name"] = "../../../step-000002"
    system.pipe_file(at, files.json_bytes(files.sealed(entry)))
    assert remote.newest(url, to.name) == []


def test_the_command_shows_the_catalogue(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "mine"
    to = opened(url, run, top_k=1)
    copied(to, save(run, 2))
    scored(to, files.folder_of(run) / files.step_name(2), 0.25)
    assert main(["catalogue", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[to.name]["checkpoints"][0]["step"] == 2
    assert main(["catalogue", url]) == 0
    out = capsys.readouterr().out
    assert to.name in out
    assert "step 2 (0.25)" in out
