"""Documents: the paths and commands they name exist, and they speak of the project alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    p for p in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if "LICENSE" not in p.name
)
PATH = re.compile(r"`((?:k3backend|tests|tools|docs|examples|\.ci)/[\w./-]*|[\w-]+\.(?:md|toml))`")


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_paths_in_documents_exist(document):
    missing = [p for p in PATH.findall(document.read_text()) if not (ROOT / p).exists()]
    assert not missing, f"{ids(document)} names {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_links_in_documents_lead_somewhere(document):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    missing = [
        t for t in targets if "://" not in t and not (document.parent / t).resolve().exists()
    ]
    assert not missing, f"{ids(document)} links to {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_scripts_in_commands_exist(document):
    commands = re.findall(r"(?:^|\s)((?:tools|examples)/[\w./-]+\.(?:py|sh))", document.read_text())
    missing = [c for c in commands if not (ROOT / c).exists()]
    assert not missing, f"{ids(document)} runs {missing}"


@pytest.mark.parametrize("document", sorted((ROOT / "docs/decisions").glob("*.md")), ids=ids)
def test_decision_records_are_short(document):
    assert re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", document.name)
    assert len(document.read_text().splitlines()) <= 40


def test_no_file_names_a_machine_path():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    pattern = re.compile(r"(?<![A-Za-z0-9_.])/(?:work|root|home|tmp)/[A-Za-z]")
    found = []
    for name in listed:
        path = ROOT / name
        if path.suffix in {".py", ".sh", ".md", ".toml", ".json"} and path.is_file():
            found += [name for line in path.read_text().splitlines() if pattern.search(line)]
    assert not found, f"machine paths in {sorted(set(found))}"
