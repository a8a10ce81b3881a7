"""Bad input of every kind: exit 2, one line that names the argument, nothing on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_lines import REPOSITORY, assert_refused, run_here

CONFIGS = REPOSITORY / "k3backend" / "data" / "configs"
CASES = REPOSITORY / "tests" / "data" / "planning"

LAYOUT_FLAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unknown flag": (("--tensor-parallel", "8"), ("--tensor-parallel",)),
    "misspelt flag": (("--spec-token", "7"), ("--spec-token", "did you mean --spec-tokens")),
    "abbreviated flag": (("--targ", "kimi-k3"), ("--targ",)),
    "stray word": (("kimi-k3",), ("kimi-k3",)),
    "flag without value": (("--tp",), ("--tp", "expected one argument")),
    "flag given twice": (("--tp", "8", "--tp", "4"), ("--tp", "given twice")),
    "switch with a value": (("--json=yes",), ("--json",)),
    "tp zero": (("--tp", "0"), ("--tp", "'0'", "from 1")),
    "tp negative": (("--tp", "-8"), ("--tp", "'-8'")),
    "tp text": (("--tp", "eight"), ("--tp", "'eight'")),
    "tp empty": (("--tp", ""), ("--tp", "''")),
    "tp decimal": (("--tp", "8.0"), ("--tp", "'8.0'")),
    "tp underscore": (("--tp", "1_6"), ("--tp", "'1_6'")),
    "tp plus": (("--tp", "+8"), ("--tp", "'+8'")),
    "tp full-width digit": (("--tp", "\uff18"), ("--tp",)),
    "tp superscript": (("--tp", "\u00b2"), ("--tp",)),
    "tp hexadecimal": (("--tp", "0x8"), ("--tp",)),
    "tp of 5000 digits": (("--tp", "9" * 5000), ("--tp",)),
    "tp that does not divide the heads": (("--tp", "7"), ("--tp", "96", "1, 2, 3, 4")),
    "tp above the heads": (("--tp", "192"), ("--tp", "96")),
    "dcp that does not divide tp": (("--dcp", "3"), ("--dcp", "--tp")),
    "dcp above tp": (("--dcp", "16"), ("--dcp", "--tp")),
    "pp above the layers": (("--pp", "94"), ("--pp", "93")),
    "unknown target": (("--target", "kimi-k4"), ("--target", "kimi-k3", "kimi-linear-48b")),
    "target empty": (("--target", ""), ("--target",)),
    "target blank": (("--target", "  "), ("--target",)),
    "target with NUL": (("--target", "a\0b"), ("--target",)),
    "target with newline": (("--target", "kimi\nk3"), ("--target",)),
    "target is a draft": (("--target", "dspark-mla"), ("--target", "--draft")),
    "draft is a target": (("--draft", "kimi-k3"), ("--draft", "--target")),
    "unknown draft": (("--draft", "dspark"), ("--draft", "dspark-mla")),
    "unknown platform": (("--platform", "amd"), ("--platform", "nvidia, rocm, reference, all")),
    "platform in capitals": (("--platform", "ROCM"), ("--platform", "rocm")),
    "unknown policy": (("--policy", "best"), ("--policy", "k3, vllm, isolate")),
    "unknown layout": (("--layout", "LBNCH"), ("--layout", "LBNHC")),
    "unknown kv dtype": (("--kv-dtype", "fp9"), ("--kv-dtype", "fp8_e4m3")),
    "draft dtype without draft": (("--draft-kv-dtype", "bf16"), ("--draft-kv-dtype", "--draft")),
    "shards without draft": (("--draft-max-tp-shards", "1"), ("--draft-max-tp-shards", "--draft")),
    "shards zero": (
        ("--draft", "dspark-mla", "--draft-max-tp-shards", "0"),
        ("--draft-max-tp-shards",),
    ),
    "shards None": (
        ("--draft", "dspark-mla", "--draft-max-tp-shards", "None"),
        ("--draft-max-tp-shards", "'None'"),
    ),
    "spec tokens negative": (("--spec-tokens", "-1"), ("--spec-tokens",)),
    "spec tokens absurd": (("--spec-tokens", "1000000"), ("--spec-tokens", "1,024")),
    "length zero": (("--max-model-len", "0"), ("--max-model-len",)),
    "length absurd": (("--max-model-len", "99999999999"), ("--max-model-len", "2,147,483,647")),
    "length exponent": (("--max-model-len", "1e6"), ("--max-model-len",)),
    "in flight zero": (("--max-in-flight-tokens", "0"), ("--max-in-flight-tokens",)),
    "cache mode all": (("--mamba-cache-mode", "all"), ("--mamba-cache-mode", "align, none")),
    "checkpoint blocks negative": (
        ("--prefill-checkpoint-blocks", "-1"),
        ("--prefill-checkpoint-blocks",),
    ),
    "block size odd": (("--block-size", "100"), ("--block-size", "16")),
    "block size zero": (("--block-size", "0"), ("--block-size",)),
    "memory NaN": (("--memory", "nan"), ("--memory", "GiB")),
    "memory infinite": (("--memory", "inf"), ("--memory",)),
    "memory zero": (("--memory", "0"), ("--memory",)),
    "memory negative": (("--memory", "-60"), ("--memory",)),
    "memory below a byte": (("--memory", "0.000000000001"), ("--memory",)),
    "memory absurd": (("--memory", "99999999"), ("--memory", "1,048,576")),
    "memory with a unit": (("--memory", "60GiB"), ("--memory",)),
    "context above the length": (
        ("--max-model-len", "1000", "--context", "1001"),
        ("--context", "1001", "1000"),
    ),
    "context zero": (("--context", "0"), ("--context",)),
    "kernel block text": (("--mla-kernel-block", "some"), ("--mla-kernel-block", "multiple:N")),
    "kernel block zero": (("--mla-kernel-block", "0"), ("--mla-kernel-block",)),
    "kernel block gap": (
        ("--draft", "dspark-mla", "--draft-kernel-block", "16,,32"),
        ("--draft-kernel-block",),
    ),
    "prefix caching yes": (("--prefix-caching", "yes"), ("--prefix-caching", "on, off")),
    "missing target file": (("--target", "no/such/config.json"), ("--target", "does not exist")),
    "target folder": (("--target", "/"), ("--target",)),
    "endless target": (("--target", "/dev/zero"), ("--target", "larger than")),
}


@pytest.mark.parametrize("kind", LAYOUT_FLAGS)
def test_layout_refuses_bad_flags(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = LAYOUT_FLAGS[kind]
    assert_refused(run_here(capsys, "layout", *words), *expected)


@pytest.mark.parametrize("command", ["layout", "explain"])
def test_both_commands_of_a_deployment_refuse_alike(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (("--tp", "7"), ("--target", "kimi-k4"), ("--memory", "nan")):
        assert_refused(run_here(capsys, command, *words), words[0])


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "blank": (b"\n\n", "is empty"),
    "binary": (bytes(range(256)), "is not UTF-8"),
    "truncated": (b'{"schema": "k3backend.specs/1", "lay', "is not JSON"),
    "array": (b"[]", "array"),
    "null": (b"null", "null"),
    "NaN": (b'{"max_model_len": NaN}', "NaN"),
    "repeated key": (b'{"a": 1, "a": 1}', "repeats"),
    "other schema": (b'{"schema": "k3backend.specs/9"}', "schema"),
    "no schema": (b"{}", "schema"),
}


@pytest.mark.parametrize("flag", ["--specs", "--target", "--draft", "diff"])
@pytest.mark.parametrize("kind", FILES)
def test_refuses_unusable_files(
    flag: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, expected = FILES[kind]
    if flag in ("--target", "--draft") and "schema" in kind:
        expected = "model_type"
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    if flag == "diff":
        assert_refused(run_here(capsys, "diff", str(path), str(path)), "argument A", expected)
        return
    command = "groups" if flag == "--specs" else "layout"
    assert_refused(run_here(capsys, command, flag, str(path)), flag, expected)
    if command == "groups":
        assert_refused(run_here(capsys, "explain", flag, str(path)), flag, expected)


def test_refuses_a_file_that_may_not_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    outcome = run_here(capsys, "groups", "--specs", str(tmp_path / "a.json"))
    assert_refused(outcome, "--specs", "Permission denied")


def edited(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    specs: dict[str, Any] = json.loads((CASES / "k3-mla-draft.json").read_text())["specs"]
    change(specs)
    return specs


SPEC_EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no layers": (lambda s: s.update(layers=[]), "layers"),
    "layers of another type": (lambda s: s.update(layers={"a": 1}), "layers"),
    "a layer of another type": (lambda s: s["layers"].append(7), "layers[3]"),
    "unknown kind": (lambda s: s["layers"][0].update(kind="rnn"), "mla_attention"),
    "unknown field": (lambda s: s["layers"][1].update(heads=1), "heads"),
    "unknown top field": (lambda s: s.update(tp=8), "tp"),
    "unknown dtype": (lambda s: s["layers"][1].update(dtype="float7"), "float7"),
    "negative block": (lambda s: s["layers"][1].update(block_size=-16), "block_size"),
    "zero heads": (lambda s: s["layers"][1].update(num_kv_heads=0), "num_kv_heads"),
    "absurd head size": (lambda s: s["layers"][1].update(head_size=10**20), "head_size"),
    "text block": (lambda s: s["layers"][1].update(block_size="1536"), "block_size"),
    "boolean count": (lambda s: s["layers"][1].update(count=True), "count"),
    "absurd count": (lambda s: s["layers"][1].update(count=10**9), "count"),
    "missing shapes": (lambda s: s["layers"][0].pop("shapes"), "shapes"),
    "negative shape": (lambda s: s["layers"][0].update(shapes=[[-1]]), "shapes"),
    "shapes without dtypes": (lambda s: s["layers"][0].update(dtypes=["bfloat16"]), "dtypes"),
    "page below the state": (
        lambda s: s["layers"][0].update(page_size_padded=1),
        "page_size_padded",
    ),
    "same names twice": (lambda s: s["layers"][2].update(prefix="target.mla."), "target.mla.0"),
    "missing length": (lambda s: s.pop("max_model_len"), "max_model_len"),
    "length zero": (lambda s: s.update(max_model_len=0), "max_model_len"),
    "tp negative": (lambda s: s.update(tp_size=-8), "tp_size"),
    "unknown layout": (lambda s: s.update(layout="XYZ"), "LBNHC"),
    "unknown quant mode": (lambda s: s["layers"][1].update(kv_quant_mode="INT3"), "INT3"),
    "bad kernel block": (lambda s: s.update(mla_kernel_block="big"), "mla_kernel_block"),
    "stage gap": (lambda s: s["layers"][2].update(stage=2), "stage"),
    "negative memory": (lambda s: s.update(available_bytes=-1), "available_bytes"),
    "context above the length": (lambda s: s.update(context=2**40), "context"),
}


@pytest.mark.parametrize("kind", SPEC_EDITS)
def test_refuses_specs_by_name(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, expected = SPEC_EDITS[kind]
    path = tmp_path / "specs.json"
    path.write_text(json.dumps(edited(change)))
    outcome = run_here(capsys, "groups", "--policy", "vllm", "--specs", str(path))
    assert_refused(outcome, "--specs", "specs.json", expected)


def test_a_spec_file_that_cannot_be_planned_names_the_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    specs = json.loads((CASES / "k3-gqa-window-tp1-page-too-large.json").read_text())["specs"]
    path = tmp_path / "specs.json"
    path.write_text(json.dumps(specs))
    for command in ("groups", "explain"):
        outcome = run_here(capsys, command, "--policy", "vllm", "--specs", str(path))
        assert_refused(outcome, "--specs", "specs.json", "draft.0", "50331648")


OTHER_COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "groups without specs": (("groups",), ("--specs",)),
    "groups with a deployment flag": (("groups", "--specs", "a", "--tp", "8"), ("--tp",)),
    "explain with both": (("explain", "--specs", "a.json", "--tp", "8"), ("--tp", "--specs")),
    "explain specs twice": (("explain", "--specs", "a", "--specs", "b"), ("--specs", "twice")),
    "diff without files": (("diff",), ("A", "B")),
    "diff with one file": (("diff", "a.json"), ("B",)),
    "diff with three files": (("diff", "a", "b", "c"), ("c",)),
    "platform with a value": (("platform", "rocm"), ("rocm",)),
    "routes without heads": (("platform", "--routes", "--tp", "7"), ("argument --tp: 7", "96")),
    "routes without draft heads": (
        ("platform", "--routes", "--draft-heads", "60"),
        ("argument --tp: 8", "--draft-heads 60"),
    ),
    "routes with odd dcp": (
        ("platform", "--routes", "--dcp", "3"),
        ("argument --dcp: 3", "--tp 8"),
    ),
    "routes of an unknown GPU": (
        ("platform", "--routes", "--arch", "gfx90a"),
        ("argument --arch: 'gfx90a'", "gfx950, gfx942"),
    ),
    "routes with unicode digits": (("platform", "--routes", "--tp", "\uff18"), ("--tp",)),
    "routes flag alone": (("platform", "--tp", "8"), ("--tp", "--routes")),
}


@pytest.mark.parametrize("kind", OTHER_COMMANDS)
def test_other_commands_refuse(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = OTHER_COMMANDS[kind]
    assert_refused(run_here(capsys, *words), *expected)


def test_a_bad_environment_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("-5", "many", "\uff18", "99999999999", "9" * 5000, "9" * 30):
        monkeypatch.setenv("K3BACKEND_PLAN_CONTEXT", value)
        outcome = run_here(capsys, "layout", "--policy", "vllm")
        assert_refused(outcome, "K3BACKEND_PLAN_CONTEXT", value[:50] if value.isascii() else "PLAN")
        assert len(outcome.stderr) < 300


def test_a_config_that_is_no_kimi_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((CONFIGS / "kimi-k3.json").read_text())
    for key, value in (("num_hidden_layers", 92), ("kv_lora_rank", "512"), ("dtype", "int3")):
        changed = {**config, "text_config": {**config["text_config"], key: value}}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(changed))
        outcome = run_here(capsys, "layout", "--policy", "vllm", "--target", str(path))
        assert_refused(outcome, "--target", "full_attn_layers" if value == 92 else key)
