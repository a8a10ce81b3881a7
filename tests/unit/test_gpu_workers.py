"""The processes of tools/gpu_check.py, with benches that follow a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from k3backend.common.errors import PlatformError
from tests.helpers.scripted_bench import open_dead, open_nothing, open_script
from tools import gpu_check
from tools.gpu_bench import Names
from tools.gpu_workers import BUDGET, Ended, Workers, failure

ROOT = Path(__file__).resolve().parents[2]
ALL_RIGHT = Names(
    ["check works A", "check works B"],
    ["compile works A"],
    ["copy", "speed works A", "peer works: works A"],
)


def ended(names: list[str], count: int = 1, entry_s: float = 3.0, **limits: float) -> list[Ended]:
    """How the entries end in workers of the script; limits are seconds from the first start."""
    with Workers(open_script) as workers:
        assert workers.open(1)
        now = time.monotonic()
        starts_until = now + limits.get("starts_s", 60)
        return list(
            workers.run(
                names,
                count=count,
                entry_s=entry_s,
                starts_until=starts_until,
                ends_by=now + limits.get("ends_s", 60),
            )
        )


def test_an_entry_that_dies_hangs_raises_or_loses_the_device_loses_itself_alone() -> None:
    names = [f"check {what} {at}" for at in "AB" for what in ("dies", "hangs", "raises", "lost")]
    names = ["check works A", *names, "check works B"]
    found = {end.name: end for end in ended(names, entry_s=1.5)}
    assert list(found) == names, "one worker runs entries in their order"
    for at in "AB":
        assert found[f"check works {at}"].result is not None
        assert found[f"check dies {at}"].why_not == "its process ended with exit code 7"
        assert "no answer in 2 s" in found[f"check hangs {at}"].why_not
        raised, lost = found[f"check raises {at}"].result, found[f"check lost {at}"].result
        assert raised == {"why_not": "RuntimeError: first line"}
        assert lost is not None
        assert "illegal memory access" in lost["why_not"]


def test_several_workers_share_the_entries() -> None:
    names = [f"check slow {index}" for index in range(6)]
    found = ended(names, count=3)
    assert sorted(end.name for end in found) == names
    assert len({end.result["pid"] for end in found if end.result}) >= 2


def test_one_worker_is_left_where_one_is_asked_for() -> None:
    with Workers(open_script) as workers:
        assert workers.open(3)
        limits: dict[str, Any] = {
            "entry_s": 9, "starts_until": time.monotonic() + 60, "ends_by": time.monotonic() + 60
        }  # fmt: skip
        several = list(workers.run([f"check slow {i}" for i in range(6)], count=3, **limits))
        single = list(workers.run([f"check works {i}" for i in range(3)], count=1, **limits))
    pids = {end.result["pid"] for end in several if end.result}
    alone = {end.result["pid"] for end in single if end.result}
    assert len(several) == 6
    assert len(alone) == 1
    assert alone <= pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_budget_stops_what_runs_and_starts_no_more() -> None:
    names = ["check works A", "check hangs A", "check works B"]
    start = time.monotonic()
    found = ended(names, entry_s=60, starts_s=1.0, ends_s=2.0)
    assert time.monotonic() - start < 20
    assert [end.name for end in found] == names[:2]
    assert found[1] == Ended("check hangs A", None, BUDGET, cut_off=True)


@pytest.mark.parametrize(
    ("opens", "said"), [(open_nothing, "no device of this kind"), (open_dead, "exit code 9")]
)
def test_a_device_that_does_not_open_is_bad_input(opens: Any, said: str) -> None:
    with Workers(opens) as workers:
        assert not workers.open(1)
        assert said in workers.refusal
    with pytest.raises(PlatformError, match=f"{said}.*--dry-run"):
        gpu_check.run(gpu_check.Record(None, 60), opens, ALL_RIGHT, None, 1)


def test_a_failure_is_one_line() -> None:
    assert failure(ValueError("\n\n  a\nb")) == "ValueError: a"
    assert failure(KeyError()) == "KeyError: no message"


def test_all_right_is_exit_code_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = gpu_check.Record(str(tmp_path / "r.json"), 60)
    assert gpu_check.run(record, open_script, ALL_RIGHT, None, 2) == 0
    document = json.loads((tmp_path / "r.json").read_text())
    assert document == record.document
    assert document["finished"] is True
    assert [row["of_copy"] for row in document["speed"] + document["peers"]] == [0.5, 0.5]
    assert document["peers"][0]["peer"] == "works"
    assert document["compilations"] == [{"name": "works A", "nan": False}]
    assert document["left_out"] == []
    assert "2 checks right, 0 wrong, 1 of 1 shapes timed, 0 left out" in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == [tmp_path / "r.json"], "nothing but the result is left"


@pytest.mark.parametrize(
    ("section", "bad"),
    [
        ("correctness", "check wrong A"), ("correctness", "check dies A"),
        ("correctness", "check hangs A"), ("correctness", "check raises A"),
        ("speed", "speed wrong A"), ("speed", "speed raises A"), ("speed", "speed dies A"),
    ],
)  # fmt: skip
def test_one_bad_entry_is_exit_code_1_and_the_rest_goes_on(
    section: str, bad: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "CHECK_S", 1.5)
    names = Names(
        [*([bad] if section == "correctness" else []), "check works A"],
        ["compile raises A"],
        ["copy", *([bad] if section == "speed" else []), "peer raises: works A", "speed works A"],
    )
    record = gpu_check.Record(None, 60)
    assert gpu_check.run(record, open_script, names, None, 1) == 1
    document = record.document
    assert document["ok"] is False
    entries = document[section]
    assert entries[0]["name"] == bad.partition(" ")[2]
    assert "gb_s" not in entries[0]
    assert entries[-1]["name"] == "works A"
    assert document["speed"][-1]["gb_s"] == 1000, "speed is measured all the same"
    assert document["peers"][0]["why_not"] == "RuntimeError: first line"
    assert document["compilations"][0]["why_not"] == "RuntimeError: first line"
    said = capsys.readouterr().out
    assert said.count("WRONG") == (bad.split()[1] == "wrong" or section == "correctness")


def test_a_peer_that_fails_is_no_failure_of_ours() -> None:
    names = Names([], [], ["peer raises: works A", "peer dies: works A", "peer wrong: works A"])
    record = gpu_check.Record(None, 60)
    assert gpu_check.run(record, open_script, names, None, 1) == 0
    assert [sorted(row)[-1] for row in record.document["peers"]] == ["why_not", "why_not", "wrong"]


def test_what_the_budget_cuts_off_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    names = Names(["check hangs A", "check works A"], [], ["copy", "speed works A"])
    record = gpu_check.Record(None, 3)
    assert gpu_check.run(record, open_script, names, None, 1) == 0
    assert record.elapsed_s < 20
    assert record.document["left_out"] == [
        "check hangs A", "check works A", "copy", "speed works A"
    ]  # fmt: skip
    assert capsys.readouterr().out.count("left out: ") == 4


def test_a_killed_run_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    code = (
        "from tests.helpers.scripted_bench import open_script\n"
        "from tools import gpu_check\n"
        "from tools.gpu_bench import Names\n"
        "names = Names(['check works A', 'check hangs A'], [], [])\n"
        f"gpu_check.run(gpu_check.Record({str(path)!r}, 600), open_script, names, None, 1)\n"
    )
    # A file, because the workers' main module is what started them.
    script = tmp_path / "run.py"
    script.write_text(f"if __name__ == '__main__':\n    {code.replace(chr(10), chr(10) + '    ')}")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        json.loads(path.read_text())
        if "works A" in line:
            break
    process.kill()
    process.wait(20)
    process.stdout.close()
    document = json.loads(path.read_text())
    assert [entry["name"] for entry in document["correctness"]] == ["works A"]
    assert document["finished"] is False
