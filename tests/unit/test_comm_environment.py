"""The `comm` options: names, values and interfaces are checked before a process starts; the user's variables win."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework import MeshSpec, Problem, RunPlan
from framework.process_env import environment_lines
from framework_plugins.comm import environment, interfaces, variables
from framework_plugins.comm.environment import Environment

PLAN = RunPlan(run_id="x", run_dir="/nowhere")
HOST = {"lo": ("127.0.0.1", "::1"), "eth0": ("10.0.0.2",), "eth1": ("10.0.1.2",), "ifb0": ()}
CONF = Path(__file__).parents[2] / "conf" / "comm"


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known host, and a shell without variables of the collectives."""
    monkeypatch.setattr(interfaces, "host_interfaces", lambda: dict(HOST))
    for name in list(os.environ):
        if variables.concerns(name):
            monkeypatch.delenv(name)


def problems(**settings: Any) -> list[Problem]:
    return list(Environment(**settings).check_plan(PLAN))


def option(name: str) -> dict[str, Any]:
    """Fields of a shipped option."""
    tree = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    return {key: value for key, value in tree.items() if key != "_target_"}


@pytest.mark.parametrize("name", ["auto", "debug", "ring"])
def test_shipped_options_are_right(name: str) -> None:
    assert problems(**option(name)) == []


def test_auto_sets_nothing() -> None:
    assert Environment(**option("auto")).process_env(PLAN) == {}


def test_what_debug_and_ring_set() -> None:
    assert option("debug")["timeout_s"] > option("auto")["timeout_s"]
    debug = Environment(**option("debug")).process_env(PLAN)
    assert debug["CUDA_LAUNCH_BLOCKING"] == "1"
    assert debug["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert debug["TORCH_SHOW_CPP_STACKTRACES"] == "1"
    ring = Environment(**option("ring")).process_env(PLAN)
    assert ring == {"NCCL_ALGO": "Ring", "NCCL_NTHREADS": "256", "NCCL_SOCKET_NTHREADS": "8"}


@pytest.mark.parametrize("value", ["nosuch0", "^lo", "127.0.0.1", "lo,nosuch0", "ifb0", "=lo", " lo", "e"])
def test_p42_bad_values_for_gloo(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fails late in torch 2.13, but for one character, which is ignored in silence."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    (problem,) = problems()
    assert f"GLOO_SOCKET_IFNAME={value}" in str(problem)
    assert "lo (127.0.0.1), eth0 (10.0.0.2)" in str(problem)
    assert problems(interface=value, env={})[0].setting == f"comm.interface={value}"


@pytest.mark.parametrize("value", ["", "lo", "eth0", "lo,eth0", "lo,"])
def test_p42_good_values_for_gloo(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    assert problems() == []


@pytest.mark.parametrize("value", ["eth", "=eth0", "^docker", "^=eth0", "eth0:1", "=eth0,eth1", "", "^lo"])
def test_p42_good_values_for_nccl(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    assert problems() == []


@pytest.mark.parametrize("value", ["ib", "=eth", "^lo,eth", "10.0.0.2", "=eth0,nosuch0", "ifb0", "e"])
def test_p42_bad_values_for_nccl(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    (problem,) = problems()
    assert f"NCCL_SOCKET_IFNAME={value}" in str(problem)
    assert "lo (127.0.0.1)" in str(problem)


def test_an_address_is_told_from_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "10.0.0.2")
    assert "10.0.0.2 is an address, not an interface (that of eth0)" in str(problems()[0])


def test_interface_in_each_backends_grammar() -> None:
    env = Environment(interface="eth0,eth1").process_env(PLAN)
    assert env == {"GLOO_SOCKET_IFNAME": "eth0,eth1", "NCCL_SOCKET_IFNAME": "=eth0,eth1"}
    assert problems(interface="eth0,eth1") == []
    assert "keep one of the two" in str(problems(interface="eth0", env={"GLOO_SOCKET_IFNAME": "lo"})[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_ALGO", "Ring,Tree"), ("NCCL_ALGO", "^tree"), ("NCCL_ALGO", "ring;allreduce:tree,nvls"),
        ("NCCL_PROTO", "^LL128;AllReduce:LL128"), ("NCCL_IB_DISABLE", 1), ("NCCL_IB_DISABLE", True),
        ("NCCL_NTHREADS", 128), ("NCCL_SOCKET_NTHREADS", 16), ("NCCL_P2P_LEVEL", "NVL"), ("NCCL_P2P_LEVEL", 3),
        ("NCCL_DEBUG", "info"), ("NCCL_DEBUG_SUBSYS", "INIT,NET"), ("NCCL_BUFFSIZE", 8388608), ("NCCL_IB_HCA", "mlx5"),
        ("TORCH_NCCL_BLOCKING_WAIT", "true"), ("TORCH_NCCL_ASYNC_ERROR_HANDLING", 3), ("CUDA_LAUNCH_BLOCKING", 1),
        ("TORCH_DISTRIBUTED_DEBUG", "detail"), ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", 600), ("NCCL_CUMEM_ENABLE", -2),
    ],
)  # fmt: skip
def test_good_values(name: str, value: object) -> None:
    assert problems(env={name: value}) == []


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("NCCL_ALGO", "Rng", "'Rng' must be one of Tree, Ring"),
        ("NCCL_ALGO", "ring;tree", "needs a collective in front"),
        ("NCCL_ALGO", "sendrecv:ring", "'sendrecv' must be one of Broadcast"),
        ("NCCL_IB_DISABLE", "yes", "must be one of 0, 1"),
        ("NCCL_NTHREADS", 100, "must be one of 64, 128, 256, 512"),
        ("NCCL_NTHREADS", 1024, "must be one of 64, 128, 256, 512"),
        ("NCCL_SOCKET_NTHREADS", 17, "from 1 to 16"),
        ("NCCL_SOCKET_NTHREADS", "eight", "from 1 to 16"),
        ("NCCL_IB_TIMEOUT", 32, "from 0 to 31"),
        ("NCCL_P2P_LEVEL", "nvl", "must be one of LOC"),
        ("NCCL_DEBUG", "verbose", "VERSION, WARN, INFO"),
        ("NCCL_BUFFSIZE", "8M", "whole number"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", 4, "from 0 to 3"),
        ("TORCH_NCCL_BLOCKING_WAIT", "on", "must be one of"),
        ("TORCH_DISTRIBUTED_DEBUG", "ALL", "OFF, INFO, DETAIL"),
        ("CUDA_LAUNCH_BLOCKING", "true", "must be one of 0, 1"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", 0, "at least 1"),
        ("GLOO_DEVICE_TRANSPORT", "RDMA", "TCP, TCP_TLS"),
        ("NCCL_CONF_FILE", None, "must not be empty"),
    ],
)
def test_bad_values_in_config_and_in_the_shell(
    name: str, value: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = problems(env={name: value})
    assert problem.setting == f"comm.env.{name}={environment.text(value)}"
    assert reason in problem.reason
    monkeypatch.setenv(name, environment.text(value))
    (problem,) = problems()
    assert problem.setting.startswith(f"{name}=")
    assert "exported" in problem.setting
    assert reason in problem.reason


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("NCCL_ALGOS", "comm.env.NCCL_ALGO"),
        ("NCCL_SOCKET_NTHREAD", "comm.env.NCCL_SOCKET_NTHREADS"),
        ("TORCH_DISTRIBUTED_DEBG", "comm.env.TORCH_DISTRIBUTED_DEBUG"),
        ("NCCL_BLOCKING_WAIT", "comm.env.TORCH_NCCL_BLOCKING_WAIT"),
        ("NCCL_TIMEOUT", "timeout_s=1"),
        ("HOME", ""),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, fix: str) -> None:
    (problem,) = problems(env={name: 1})
    assert problem.fix == fix


def test_nccl_timeout_in_the_shell_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TIMEOUT", "1800")
    assert problems()[0].fix == "`unset NCCL_TIMEOUT` and timeout_s=1800"


@pytest.mark.parametrize(
    ("strategy", "accelerator", "mesh", "refused"),
    [
        ("ddp", "cpu", MeshSpec(dp_replicate=2), True),
        ("ddp", "cuda", MeshSpec(dp_replicate=2), False),
        ("ddp", "cpu", MeshSpec(dp_replicate=2, pp=2), False),
        ("fsdp", "cpu", MeshSpec(dp_shard=2), False),
    ],
)
def test_a_crash_of_torchs_is_refused_beforehand(
    strategy: str, accelerator: str, mesh: MeshSpec, refused: bool
) -> None:
    plan = PLAN.with_(accelerator=accelerator, mesh=mesh, components={"strategy": {"option": strategy}})
    found = Environment(**option("debug")).check_plan(plan)
    assert [problem.fix for problem in found] == (
        ["comm.env.TORCH_DISTRIBUTED_DEBUG=INFO, or strategy=fsdp"] if refused else []
    )


def test_what_an_image_exports_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_VERSION", "2.30.4-1")
    monkeypatch.setenv("NCCL_FASTRAK_NUM_FLOWS", "2")
    assert problems() == []
    assert "NCCL_VERSION" not in Environment().process_env(PLAN)


def test_values_that_are_wrong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NSOCKS_PERTHREAD", "16")
    (problem,) = problems(env={"NCCL_SOCKET_NTHREADS": 8})
    assert "8 x NCCL_NSOCKS_PERTHREAD 16 = 128" in problem.reason
    assert problems(env={"NCCL_MIN_CTAS": 8, "NCCL_MAX_CTAS": 4})[0].setting.startswith("NCCL_MIN_CTAS")


def test_all_complaints_at_once() -> None:
    assert len(problems(interface="nosuch0", env={"NCCL_ALGO": "x", "NCCL_NTHREADS": 1, "NCCL_FOO": 2})) == 4


def test_the_users_own_variables_are_in_the_plan_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the start screen names all in effect; the core lets what is exported win."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("HOME", "/root")
    assert Environment(env={"NCCL_ALGO": "Ring"}).process_env(PLAN) == {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO"}


def test_lines_for_the_start_screen() -> None:
    plan = PLAN.with_(
        env={"NCCL_ALGO": "Tree", "NCCL_DEBUG": "INFO", "NCCL_NTHREADS": "256", "MY_TOKEN": "secret-value"},
        facts={"exported": {"NCCL_ALGO": "Tree (exported, instead of Ring)"}},
    )
    assert environment_lines(plan, {"NCCL_ALGO": "Tree", "NCCL_DEBUG": "INFO", "MY_TOKEN": "secret-value"}) == [
        "MY_TOKEN=***",
        "NCCL_ALGO=Tree (exported, instead of Ring)",
        "NCCL_DEBUG=INFO (exported)",
        "NCCL_NTHREADS=256",
    ]


def test_this_host_has_a_loopback() -> None:
    assert "127.0.0.1" in interfaces.psutil.net_if_addrs()["lo"][0].address
