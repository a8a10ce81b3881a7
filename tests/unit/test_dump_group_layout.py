"""``tools/dump_group_layout.py`` shows what ``k3backend layout`` plans, platforms side by side."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.helpers.command_lines import REPOSITORY

K3 = ("--draft", "dspark-mla", "--tp", "8", "--kv-dtype", "fp8", "--policy", "vllm")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "dump_group_layout.py"), *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_shows_every_platform_in_one_table() -> None:
    done = run(*K3)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    header = done.stdout.splitlines()[0].split()
    assert header == ["nvidia", "rocm", "reference"]
    lines = {line[:20].strip(): line for line in done.stdout.splitlines()}
    assert lines["group 3"].count("mla 29d 1536x884736") == 3
    assert lines["one block ID"].count("25,657,344 B") == 3
    assert lines["bytes a request"].count("18,216,714,240 B") == 3
    assert "All platforms plan the same." in done.stdout


def test_twenty_groups_keep_to_the_width() -> None:
    done = run("--draft", "dspark-gqa-window", "--policy", "vllm")
    assert done.returncode == 0
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert "\u2026" not in done.stdout, "a cell was cut"
    assert done.stdout.count("window 5d 1536x884736") == 3


def test_prints_the_same_json_as_the_command() -> None:
    command = subprocess.run(
        [sys.executable, "-m", "k3backend", "layout", *K3, "--platform", "all", "--json"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=60,
        check=True,
    )
    assert json.loads(run(*K3, "--json").stdout) == json.loads(command.stdout)
    one = json.loads(run(*K3, "--platform", "rocm", "--json").stdout)
    assert one == json.loads(command.stdout)["platforms"]["rocm"]


def test_refuses_in_one_line() -> None:
    done = run("--tp", "7")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dump_group_layout.py: error: --tp is 7")
    assert done.stderr.count("\n") == 1
