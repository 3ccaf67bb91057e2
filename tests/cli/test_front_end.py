"""The program as it is typed: spellings, refusals before anything starts, runs and sweeps (cases P01, P03 to P06)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import yaml
from launching import TAG

from framework import cli, launch
from framework.errors import EXIT_OK, EXIT_RUN_FAILED, EXIT_USAGE, RunFailedError
from framework.job import claim, read_plan
from framework.multirun import exit_code

HERE = Path(__file__).parent
PROBE = [
    "model._target_=probe_project.Probe",
    "data._target_=probe_project.Numbers",
    "optimizer=none",
    "logger=none",
    "global_batch_size=4",
    "recovery=none",
    "trainer.enable_progress_bar=false",
    "threads=1",
]


@pytest.fixture
def program(monkeypatch, capsys, tmp_path):
    """Return a function that runs the program in this process, in an empty folder, where no worker may be started."""

    def never(*_args, **_kwargs):
        raise AssertionError("a process would have been started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr(launch, "launch", never)
    monkeypatch.setattr(launch, "prewarm", lambda: None)  # no worker: it only imports torch for those to come
    monkeypatch.setattr("subprocess.Popen.__init__", never)

    def run(*words: str) -> tuple[int, str]:
        code = cli.main(words)
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def start(folder: Path, *words: str, limit: float = 240) -> tuple[int, str, str]:
    """Run the program as a process in `folder`; return exit code, what it said, and the tag of all its processes."""
    tag = uuid.uuid4().hex
    env = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1", "COLUMNS": "160", TAG: tag}
    command = [sys.executable, "-m", "framework", *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=limit, check=False)
    return done.returncode, done.stdout + done.stderr, tag


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def alive(tag: str) -> list[str]:
    """Return the command lines of processes that carry the tag."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{TAG}={tag}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text())
        except OSError:
            continue
    return found


# -- spellings (P04) ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["+strategy=fsdp", "+pp=gpipe"], ["strategy=fsdp", "pp=gpipe"]])
def test_the_documented_command_works_in_both_spellings(program, tmp_path, words):
    code, text = program("plan", *words)
    assert code == EXIT_OK
    assert "pp 2 x dp_shard 2" in text
    assert not list(tmp_path.iterdir()), "plan writes nothing"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["+pp=gpip"], ["gpipe"]),
        (["+trainer.max_stepz=1"], ["max_steps"]),
        (["strategy=ddp", "strategy=fsdp"], ["strategy=ddp", "strategy=fsdp"]),
        (["++strategy=fsdp"], ["Type +strategy=fsdp."]),
        (["trian"], ["'trian'", "Type train."]),
        (["-cn", "gpt_tinny"], ["gpt_tinny", "gpt_tiny"]),
        (["-cn", "gpt_tiny", "model.widht=3"], ["model.width=3"]),
        (["-cd", "nowhere"], ["nowhere"]),
        (["-cp", "."], ["-cd"]),
        (["-m", "strategy=ddp,fsdpp"], ["'fsdpp'"]),
        (["plugins", "all"], ["plugins"]),
        # P06
        (["data.path=???"], ["data.path"]),
        (["model.hidden=${model.widht}"], ["model.hidden", "model.widht", "${model.width}"]),
        (["model._target_=probe_broken.Model"], ["libfoo missing"]),
        # P03
        (["seed=0x10"], ["seed", "0x10"]),
        (["ckpt_path=/a b/epoch=1-step=2.ckpt"], ["'ckpt_path=\"/a b/epoch=1-step=2.ckpt\"'"]),
        # P26, P38
        (["+pp=gpipe", "pp.microbatches=3", "global_batch_size=8"], ["pp.microbatches=3", "8 samples"]),
        (["+pp=gpipe", "pp.microbatches=4", "global_batch_size=2"], ["pp.microbatches=4", "2 samples"]),
        (["+pp=1f1b", "pp.microbatches=1"], ["pp.microbatches=1", "2 stages"]),
        (["+tp=dtensor", "+pp=gpipe", "devices=2"], ["devices=2", "pp 2 x tp 2 = 4"]),
        (["devices=4"], ["+strategy=ddp"]),
    ],
)
def test_a_mistake_ends_with_code_2_before_anything_is_started_or_written(program, tmp_path, words, said):
    (tmp_path / "probe_broken.py").write_text("raise ImportError('libfoo missing')\n")
    sys.path.insert(0, str(tmp_path))
    try:
        code, text = program(*words)
    finally:
        sys.path.remove(str(tmp_path))
    assert code == EXIT_USAGE, text
    for word in said:
        assert word in text
    assert "Traceback" not in text
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["probe_broken.py"]


def test_what_launch_raises_is_said_with_its_own_exit_code(program, monkeypatch):
    def refuse(plan):
        raise RunFailedError("no process could be started")

    monkeypatch.setattr(launch, "launch", refuse)
    code, text = program(*PROBE)
    assert code == EXIT_RUN_FAILED
    assert "framework: no process could be started" in text
    assert "Traceback" not in text
    monkeypatch.setattr(launch, "launch", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        program(*PROBE)


def test_under_torchrun_both_world_sizes_are_named(program, monkeypatch):
    """P38 (c): torchrun has started 2, the config says 1."""
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code, text = program("devices=1")
    assert code == EXIT_USAGE
    assert "WORLD_SIZE=2" in text
    assert "launcher=torchrun" in text
    code, text = program("devices=1", "launcher=torchrun")
    assert code == EXIT_USAGE
    assert "2 ranks" in text
    assert "the plan has 1" in text
    code, text = program("-m", "seed=1,2")
    assert code == EXIT_USAGE
    assert "each rank would run the whole sweep" in text


def test_plan_shows_each_job_of_a_sweep(program):
    code, text = program("plan", "-m", "strategy=ddp,fsdp", "pp=none,gpipe")
    assert code == EXIT_OK
    for number, mesh in enumerate(("dp_replicate 2", "pp 2 x dp_replicate 2", "dp_shard 2", "pp 2 x dp_shard 2")):
        assert re.search(rf"job {number}: .*(?:.*\n)+?Mesh: {mesh}\n", text), mesh
    code, text = program("plan", "-m", "pp=none,gpipe", "devices=2")
    assert code == EXIT_USAGE
    assert "job 0 can't run" in text
    assert "job 1: pp=gpipe" in text, "the other one is shown all the same"


def test_the_composed_settings_can_be_printed(program):
    code, text = program("--cfg", "job", "+strategy=fsdp", "seed=7")
    assert code == EXIT_OK
    tree = yaml.safe_load(text)
    assert tree["seed"] == 7
    assert tree["strategy"]["_target_"].endswith("FSDP")


def test_two_runs_of_one_second_get_two_folders(tmp_path):
    names = [claim(tmp_path / "12-00-00").name for _ in range(3)]
    assert names == ["12-00-00", "12-00-00-2", "12-00-00-3"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names)


# -- runs and sweeps, with real processes ------------------------------------------------------------------------


def test_one_run_has_one_folder_and_every_rank_the_same_plan(tmp_path):
    """P02 and P03: one folder, one config; the folder's name reaches the ranks whatever characters are in it."""
    folder = tmp_path / "a b" / "x=1"
    log = tmp_path / "probe.jsonl"
    code, text, tag = start(
        tmp_path, *PROBE, "strategy=ddp", "trainer.max_steps=2", f"model.log={log}", f'run_dir="{folder}"'
    )
    assert code == EXIT_OK, text
    assert not alive(tag)
    ranks = lines(log)
    assert sorted(line["rank"] for line in ranks) == [0, 1]
    assert {line["run_dir"] for line in ranks} == {str(folder)}
    assert len({line["pid"] for line in ranks}) == 2
    assert len(list(tmp_path.rglob(".hydra/config.yaml"))) == 1
    assert not (tmp_path / "runs").exists()
    made = read_plan(folder)
    assert made.world_size == 2
    assert made.trainer["max_steps"] == 2
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


def test_a_sweep_gives_each_rank_its_own_job_only(tmp_path):
    """P01: 2 jobs of 2 ranks are 4 ranks, each with the learning rate of its job; then the table of P05's form."""
    log = tmp_path / "probe.jsonl"
    code, text, tag = start(
        tmp_path, "-m", *PROBE, "model.lr=0.1,0.2", "strategy=ddp", "devices=2", "trainer.max_steps=2",
        f"model.log={log}", f"hydra.sweep.dir={tmp_path}/s",
    )  # fmt: skip
    assert code == EXIT_OK, text
    assert not alive(tag)
    seen = sorted((Path(line["run_dir"]).name, line["rank"], line["lr"], line["world"]) for line in lines(log))
    assert seen == [("0", 0, 0.1, 2), ("0", 1, 0.1, 2), ("1", 0, 0.2, 2), ("1", 1, 0.2, 2)]
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["0", "1", "multirun.yaml"]
    table = [line for line in text.splitlines() if re.match(r"\s+[01]\s+finished", line)]
    assert len(table) == 2
    assert ["model.lr=0.1" in table[0], "model.lr=0.2" in table[1]] == [True, True]


def test_a_sweep_runs_all_jobs_and_reports_every_failure(tmp_path):
    """P05: jobs 0 and 2 fail in different ways, and job 1 between them finishes."""
    code, text, tag = start(tmp_path, "-m", *PROBE, "model.fail=boomA,null,boomC", "trainer.max_steps=1")
    assert code == 1, text
    assert not alive(tag)
    summary = text[text.rindex("tokens/s") :]
    states = re.findall(r"^\s+(\d)\s+(finished|failed|not run)\b", summary, re.MULTILINE)
    assert states == [("0", "failed"), ("1", "finished"), ("2", "failed")]
    assert re.search(r"job 0 failed: .*boomA", summary)
    assert re.search(r"job 2 failed: .*boomC", summary)
    (sweep,) = (tmp_path / "runs").glob("*/*")
    assert json.loads((sweep / "1" / "summary.json").read_text())["status"] == "finished"
    assert [json.loads((sweep / str(job) / "job.json").read_text())["exit_code"] for job in range(3)] == [1, 0, 1]


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([0, 1], 1), ([0, 2], 1), ([2, 2], 2), ([1, 2], 1), ([0, 75], 75), ([1, 130], 130)],
)
def test_a_sweep_has_one_exit_code(codes, code):
    assert exit_code(codes) == code


SWEEPER = """
from hydra.core.utils import JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins


class Picky(Sweeper):
    '''Tells what it is told of each job, as an optimising sweeper would read it.'''

    def setup(self, *, hydra_context, task_function, config):
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        jobs = [[*arguments, "++model.fail=boom"], [*arguments, "++model.fail=null"]]
        for result in self.launcher.launch(jobs, initial_job_idx=0):
            value = result.return_value if result.status == JobStatus.COMPLETED else "no number"
            print("TOLD", result.status.name, type(value).__name__)


ConfigStore.instance().store(group="hydra/sweeper", name="picky", node={"_target_": __name__ + ".Picky"})
"""


def test_a_sweeper_of_hydras_is_told_failed_and_not_a_number(tmp_path):
    plugin = tmp_path / "hydra_plugins" / "picky" / "__init__.py"
    plugin.parent.mkdir(parents=True)
    plugin.write_text(SWEEPER)
    code, text, tag = start(tmp_path, "-m", "hydra/sweeper=picky", *PROBE, "trainer.max_steps=1")
    told = re.findall(r"^TOLD (\w+) (\w+)", text, re.MULTILINE)
    assert told == [("FAILED", "str"), ("COMPLETED", "float")], text
    assert code == 1
    assert not alive(tag)
