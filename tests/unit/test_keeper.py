"""Keepers: what they take, refuse by name, give back and forget; over real sockets, in this process."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from framework import checkpoint_files as files
from framework.versions import Clock
from framework_plugins.checkpoint import memory, peers, tiers, wire
from framework_plugins.checkpoint.dcp import DCP
from framework_plugins.checkpoint.keeper import Keeper
from framework_plugins.checkpoint.peers import Peers
from framework_plugins.checkpoint.storage import file_name
from framework_plugins.checkpoint.store import ShardedStore

RUN = "0123456789abcdef" * 2
TENSORS = {"model.a": torch.arange(6.0), "model.b": torch.ones(3, dtype=torch.float64)}


@dataclass
class Kept:
    """A keeper, its address and its folder."""

    peer: str
    folder: Path
    keeper: Keeper

    @property
    def root(self) -> Path:
        return memory.root(RUN, self.folder)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    monkeypatch.setenv(wire.KEY, "a key of at least 16")
    folder = tmp_path / "keeper"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        keeper = Keeper(folder)
        thread = threading.Thread(target=keeper.serve, args=(listening,))
        thread.start()
        yield Kept(f"127.0.0.1:{listening.getsockname()[1]}", folder, keeper)
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def save(folder: Path, step: int, life: int = 1) -> Path:
    path = files.folder_of(memory.root(RUN, folder)) / files.step_name(step)
    ShardedStore().save(str(path), TENSORS, {"step": step, "clock": Clock(life, (step,)).to_dict()})
    return path


@pytest.fixture
def host(tmp_path: Path) -> Path:
    folder = tmp_path / "host"
    folder.mkdir()
    return folder


def sender(kept: Kept, host: Path) -> Peers:
    return Peers([kept.peer], RUN, str(host), 0)


def ask(kept: Kept, **message: Any) -> dict[str, Any]:
    with wire.connected(kept.peer) as connection:
        return wire.ask(connection, kept.peer, **message)


def test_what_was_sent_comes_back_as_it_was(kept: Kept, host: Path, tmp_path: Path) -> None:
    path = save(host, 4)
    sender(kept, host).send(path, None)
    shutil.rmtree(memory.root(RUN, host))  # the host is gone
    new = memory.root(RUN, tmp_path / "new")
    (found,) = peers.look([kept.peer], RUN, new)
    fetched = peers.fetch(found, RUN, new)
    read = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    ShardedStore().load(str(fetched), read, ("model.",))
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    assert peers.fetch(found, RUN, new) == fetched, "it is there: nothing is fetched again"


def test_only_the_newest_is_kept(kept: Kept, host: Path) -> None:
    to = sender(kept, host)
    for step in (2, 4, 6):
        to.send(save(host, step), None)
    assert [path.name for path in files.folder_of(kept.root).iterdir()] == [files.step_name(6)]
    to.drop()
    assert not kept.root.exists()


def test_what_was_given_up_does_not_pile_up(kept: Kept, host: Path) -> None:
    for step in (2, 4, 6):  # a put each, and never a commit
        path, name = save(host, step), file_name(0)
        at = {"run": RUN, "step": path.name, "clock": Clock(1, (step,)).to_dict()}
        with wire.connected(kept.peer) as connection:
            wire.ask(connection, kept.peer, do="put", **at, file=name, size=(path / name).stat().st_size)
            wire.send_file(connection, path / name, (path / name).stat().st_size)
            wire.hear(connection)
    assert [path.name for path in files.folder_of(kept.root).iterdir()] == [".step-000006.1.tmp"]


def test_an_older_one_is_kept_until_the_newer_is_whole_everywhere(kept: Kept, host: Path) -> None:
    assert sender(kept, host).send(save(host, 2), None)
    kept.keeper.free_bytes = 1 << 60  # it takes nothing more
    assert not sender(kept, host).send(save(host, 4), None)
    assert [path.name for path in files.folder_of(kept.root).glob("step-*")] == [files.step_name(2)]


def test_a_straggler_is_refused_by_name(kept: Kept, host: Path, caplog: pytest.LogCaptureFixture) -> None:
    to = sender(kept, host)
    late = save(host, 4)
    to.send(save(host, 6), None)
    with caplog.at_level(logging.WARNING):
        to.send(late, None)
    assert "rank-00000.safetensors of step 4, life 1 comes too late: the state of step 6, life 1 is complete here" in (
        caplog.text
    )
    assert [path.name for path in files.folder_of(kept.root).iterdir()] == [files.step_name(6)]


def test_a_later_life_that_went_back_is_newer(kept: Kept, host: Path) -> None:
    to = sender(kept, host)
    to.send(save(host, 6), None)
    to.send(save(host, 4, life=2), None)
    assert [path.name for path in files.folder_of(kept.root).iterdir()] == [files.step_name(4)]


def test_a_rank_file_of_another_version_is_refused_by_name(host: Path) -> None:
    """A file that a rank of an earlier life put into a checkpoint of this one."""
    old, new = save(host, 4), save(host, 6, life=2)
    for name in ("rank-00000.safetensors",):
        assert (old / name).stat().st_size == (new / name).stat().st_size
        shutil.copy(old / name, new / name)
    wanted = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    with pytest.raises(files.DamagedError, match=r"rank-00000.safetensors holds the state of step 4, life 1, but this"):
        ShardedStore().load(str(new), wanted, ("model.",))


def test_a_copy_without_its_mark_is_no_checkpoint(kept: Kept, host: Path, tmp_path: Path) -> None:
    path, name = save(host, 4), file_name(0)
    step = {"run": RUN, "step": path.name, "clock": Clock(1, (4,)).to_dict()}
    with wire.connected(kept.peer) as connection:
        wire.ask(connection, kept.peer, do="put", **step, file=name, size=(path / name).stat().st_size)
        wire.send_file(connection, path / name, (path / name).stat().st_size)
        wire.hear(connection)
    assert peers.look([kept.peer], RUN, tmp_path / "new") == []


def test_what_a_keeper_has_of_one_host_and_this_host_has_itself_make_a_whole(
    kept: Kept, host: Path, tmp_path: Path
) -> None:
    path = save(host, 4)
    sender(kept, host).send(path, None)
    (files.folder_of(kept.root) / path.name / files.INDEX).unlink()
    assert peers.look([kept.peer], RUN, tmp_path / "new") == []
    (path / file_name(0)).unlink()
    (found,) = peers.look([kept.peer], RUN, memory.root(RUN, host))
    assert set(found.at) == {file_name(0)}
    assert files.is_complete(peers.fetch(found, RUN, memory.root(RUN, host)))


def test_one_that_is_damaged_in_this_hosts_memory_comes_from_the_peer(kept: Kept, host: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / memory.NOTE).write_text(RUN)
    settings = DCP(memory_every_n_steps=1, memory_dir=str(host), peers=[kept.peer])
    path = save(host, 4)
    sender(kept, host).send(path, None)
    found = tiers.newest(str(run), settings)
    assert found is not None
    assert found.tier == "memory"
    content = bytearray((path / file_name(0)).read_bytes())
    content[-1] ^= 1
    (path / file_name(0)).write_bytes(content)
    files.mark_damaged(path, "a bit has flipped")
    found = tiers.newest(str(run), settings)
    assert found is not None
    assert (found.tier, found.step) == ("peer", 4)
    read = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    ShardedStore().load(found.path, read, ("model.",))
    assert torch.equal(read["model.b"], TENSORS["model.b"])


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"do": "list", "run": "../../etc"}, "no name of a run"),
        ({"do": "get", "run": RUN, "step": "step-000004", "file": "../../passwd"}, "no name of a file"),
        ({"do": "get", "run": RUN, "step": "../step-000004", "file": "index.json"}, "no name of a checkpoint"),
        ({"do": "get", "run": RUN, "step": "step-000004", "file": "index.json"}, "isn't here"),
        ({"do": "format", "run": RUN, "step": "step-000004", "clock": {"life": 1, "steps": [1]}}, "can't format"),
        ({"do": "list"}, "run"),
    ],
)
def test_what_a_keeper_does_not_do(kept: Kept, message: dict[str, Any], told: str) -> None:
    with pytest.raises(wire.PeerError, match=told):
        ask(kept, **message)


def test_another_key_is_refused_on_both_sides(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    original = wire.key
    monkeypatch.setattr(
        wire, "key", lambda: b"another key, as long" if threading.current_thread() is main else original()
    )
    main = threading.current_thread()
    with pytest.raises(wire.PeerError, match="has another FRAMEWORK_PEER_KEY"):
        ask(kept, do="list", run=RUN)


def test_a_full_memory_is_named_and_nothing_is_left(kept: Kept, host: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept.keeper.free_bytes = 1 << 60
    sender(kept, host).send(save(host, 4), None)
    assert "there is no room for rank-00000.safetensors" in caplog.text
    assert not list(kept.root.rglob("*.safetensors"))


def test_a_silent_connection_holds_nobody_up(kept: Kept, host: Path) -> None:
    """A port scanner connects and says nothing; others are served meanwhile."""
    address = wire.address(kept.peer)
    with socket.create_connection(address), socket.create_connection(address) as rude:
        rude.sendall(b"\xff\xff\xff\xff garbage")
        sender(kept, host).send(save(host, 4), None)
        assert files.is_complete(files.folder_of(kept.root) / files.step_name(4))


def test_a_keeper_on_the_same_host_is_no_peer(kept: Kept) -> None:
    assert Peers([kept.peer], RUN, str(kept.folder), 0).others == []


def test_an_address_that_nobody_listens_at_is_told(host: Path, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setenv(wire.KEY, "a key of at least 16")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        peer = f"127.0.0.1:{listening.getsockname()[1]}"
    Peers([peer], RUN, str(host), 0).send(save(host, 4), None)
    assert f"the keeper at {peer} can't be reached" in caplog.text


def test_marks_are_text_and_nothing_is_pickled(kept: Kept, host: Path) -> None:
    sender(kept, host).send(save(host, 4), None)
    assert json.loads((files.folder_of(kept.root) / files.step_name(4) / files.META).read_text())["step"] == 4
    assert "pickle" not in Path(wire.__file__).read_text().replace("would pickle", "")
