"""What this package needs of AITER's signatures, checked on recorded ones and on the real wheel."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from k3backend.rocm.aiter_signature import DECODE, ENTRY_POINTS, METADATA, check_signatures

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "check_aiter_signature.py"
RECORDED = json.loads((ROOT / "tests" / "data" / "aiter_signatures.json").read_text())
OLD = "0.1.7.post2.dev18"
LACKED_BY_OLD = {
    ("mla_decode_fwd", "page_size"),
    ("mla_decode_fwd", "nhead_kv"),
    ("mla_decode_fwd", "return_lse"),
    ("mla_decode_fwd", "causal"),
    ("mla_decode_fwd", "g_kv_indptr"),
    ("mla_decode_fwd", "cp_world_size"),
    ("mla_decode_fwd", "cp_rank"),
    ("get_mla_metadata_v1", "kv_last_page_lens"),
    ("get_mla_metadata_v1", "page_size"),
    ("get_mla_metadata_v1", "dtype_q"),
    ("get_mla_metadata_v1", "dtype_kv"),
    ("get_mla_metadata_v1", "is_cp_round_robin"),
}


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def write_wheel(path: Path, signatures: dict[str, list[str]]) -> Path:
    """A wheel with AITER's two source files, holding empty functions of these signatures."""
    files = {"aiter/mla.py": "import aiter\n", "aiter/ops/attention.py": "import torch\n"}
    for name, parameters in signatures.items():
        file = "aiter/mla.py" if name == DECODE.name else "aiter/ops/attention.py"
        files[file] += f"def {name}({', '.join(parameters)}): ...\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def test_the_last_known_version_lacks_nothing() -> None:
    report = check_signatures(RECORDED["0.1.20"]["signatures"])
    assert (report.missing, report.lacks) == ((), ())


def test_0_1_7_can_be_called_and_says_what_it_lacks() -> None:
    report = check_signatures(RECORDED[OLD]["signatures"])
    assert report.missing == ()
    assert {(function, parameter) for function, parameter, _ in report.lacks} == LACKED_BY_OLD
    assert all(so for _, _, so in report.lacks)


@pytest.mark.parametrize("entry", ENTRY_POINTS, ids=lambda entry: entry.name)
def test_every_needed_parameter_is_missed_by_name(entry) -> None:
    for parameter in entry.needed:
        signatures = {name: list(names) for name, names in RECORDED["0.1.20"]["signatures"].items()}
        signatures[entry.name].remove(parameter)
        assert f"{entry.name}({parameter})" in check_signatures(signatures).missing
    without = dict(RECORDED["0.1.20"]["signatures"])
    del without[entry.name]
    assert f"{entry.module}.{entry.name}" in check_signatures(without).missing


def test_the_work_list_goes_by_either_of_its_names() -> None:
    signatures = {name: list(names) for name, names in RECORDED[OLD]["signatures"].items()}
    assert "work_info" in signatures[METADATA.name]
    signatures[METADATA.name].remove("work_info")
    assert f"{METADATA.name}(work_info_set)" in check_signatures(signatures).missing


def test_the_tool_reads_a_wheel_without_importing_it(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "old.whl", RECORDED[OLD]["signatures"])
    done = run_tool(str(wheel))
    assert done.returncode == 0, done.stderr
    assert "can be called" in done.stdout
    for _, parameter in LACKED_BY_OLD:
        assert parameter in done.stdout
    document = json.loads(run_tool(str(wheel), "--json").stdout)
    assert {(row["function"], row["parameter"]) for row in document["lacks"]} == LACKED_BY_OLD


def test_the_tool_fails_on_a_version_that_cannot_be_called(tmp_path: Path) -> None:
    signatures = dict(RECORDED[OLD]["signatures"])
    signatures["mla_decode_fwd"] = [n for n in signatures["mla_decode_fwd"] if n != "kv_scale"]
    done = run_tool(str(write_wheel(tmp_path / "bad.whl", signatures)))
    assert done.returncode == 1
    assert "mla_decode_fwd(kv_scale)" in done.stdout


def test_the_tool_says_what_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "text.whl").write_text("no zip")
    for place in ("nowhere.whl", "text.whl"):
        done = run_tool(str(tmp_path / place))
        assert (done.returncode, done.stdout) == (2, "")
        assert "error:" in done.stderr


@pytest.mark.long
def test_the_real_wheel_is_as_recorded(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(tmp_path)]
    done = subprocess.run(
        [*pip, f"amd-aiter=={OLD}"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"the package index does not serve amd-aiter {OLD}: {done.stderr[-200:]}")
    (wheel,) = tmp_path.glob("*.whl")
    document = json.loads(run_tool(str(wheel), "--json").stdout)
    assert document["ok"]
    assert document["signatures"] == RECORDED[OLD]["signatures"]
