"""The import rules: read from the source of every module, and proven in fresh processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "k3backend"
VENDORS = ("nvidia", "rocm", "reference")
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Every module that a file imports, function-local imports included, as absolute names."""
    package = (
        module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    )
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base]).rstrip(".")
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def layer(name: str) -> str:
    """The layer that a module of this package belongs to."""
    parts = name.split(".")
    if len(parts) == 1:
        return "root"
    return "vendor" if parts[1] in VENDORS else parts[1]


ALLOWED = {
    "common": {"common"},
    "vendor": {"common"},
    "dispatch": {"common", "vendor"},
    "report": {"common", "vendor"},
    "decode": {"common", "vendor", "dispatch", "statistics"},
    "statistics": {"common", "vendor", "dispatch"},
    "vllm_plugin": {
        "common",
        "vendor",
        "dispatch",
        "report",
        "statistics",
        "decode",
        "vllm_plugin",
    },
    "cli": {"common", "vendor", "dispatch", "report", "cli", "vllm_plugin", "decode", "statistics"},
}
OUTSIDE = {
    "common": {"numpy", "torch", "packaging", "typing_extensions"},
    "kernels": {"numpy", "torch", "triton", "packaging", "typing_extensions"},
}


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_down(path):
    name = module_name(path)
    mine = layer(name)
    if mine in {"root", "__main__", "_version"}:
        return
    wrong = []
    for target in imports(path):
        if not target.startswith("k3backend."):
            continue
        theirs = layer(target)
        same_vendor = mine == "vendor" and target.split(".")[1] == name.split(".")[1]
        if theirs in {"_version", mine if mine != "vendor" else ""} or same_vendor:
            continue
        if theirs not in ALLOWED[mine]:
            wrong.append(target)
    assert not wrong, f"{name} may not import {wrong}"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_outside_packages_stay_where_they_belong(path):
    name = module_name(path)
    roots = {target.split(".")[0] for target in imports(path)} - {"k3backend", "__future__"}
    if "vllm" in roots:
        assert name.startswith("k3backend.vllm_plugin"), f"{name} imports vllm"
    if "aiter" in roots:
        assert name == "k3backend.rocm.aiter_ops", f"{name} imports aiter"
    if layer(name) == "common":
        third_party = roots - set(sys.stdlib_module_names)
        part = "kernels" if name.startswith("k3backend.common.kernels") else "common"
        assert third_party <= OUTSIDE[part], f"{name} imports {third_party - OUTSIDE[part]}"


def test_kernels_and_reference_do_not_know_each_other():
    reference = PACKAGE / "common" / "attention_reference.py"
    if reference.exists():
        assert not any(".kernels" in target for target in imports(reference))
    for path in (PACKAGE / "common" / "kernels").rglob("*.py"):
        assert not any("reference" in target for target in imports(path)), path


def test_vendors_have_the_same_modules_that_the_record_names():
    from k3backend.common.backend import Backend
    from k3backend.dispatch import load_backend

    for attribute in ("mla_specs", "gqa_draft", "mla_decode"):
        assert isinstance(getattr(Backend, attribute), property)
        files = {v: (PACKAGE / v / f"{attribute}.py").exists() for v in VENDORS}
        assert len(set(files.values())) == 1, f"{attribute} is missing somewhere: {files}"
        if not all(files.values()) or attribute == "mla_decode":
            continue
        names = {v: set(getattr(load_backend(v), attribute).__all__) for v in VENDORS}
        shared = set.intersection(*names.values())
        assert shared, f"{attribute} exports nothing in common"
        extra = {v: n - shared for v, n in names.items() if n - shared}
        assert set(extra) <= {"rocm"}, f"{attribute} exports differ: {extra}"


BLOCK = (
    "import sys\n"
    "class Block:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.split('.')[0] in {blocked!r}:\n"
    "            raise ImportError(name + ' is blocked')\n"
    "sys.meta_path.insert(0, Block())\n"
)


def fresh(code: str, *blocked: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=set(blocked)) + code],
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_the_package_imports_neither_torch_nor_numpy():
    done = fresh(
        "import k3backend\n"
        "loaded = [m for m in sys.modules if m.split('.')[0] in {'torch', 'numpy', 'triton'}\n"
        "          or m.startswith('k3backend.') and m != 'k3backend._version']\n"
        "print(loaded)"
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", ["k3backend", *(f"k3backend.{v}" for v in VENDORS)])
def test_packages_import_with_everything_heavy_blocked(name):
    done = fresh(f"import {name}", "torch", "triton", "vllm", "aiter")
    assert done.returncode == 0, done.stderr


def test_one_vendor_alone_loads_no_other():
    for vendor in VENDORS:
        done = fresh(
            f"import k3backend.{vendor} as v\n"
            "v.BACKEND.mla_specs\n"
            "print(sorted({m.split('.')[1] for m in sys.modules if m.startswith('k3backend.')}))",
            "triton",
            "vllm",
            "aiter",
        )
        assert done.returncode == 0, done.stderr
        for other in set(VENDORS) - {vendor}:
            assert repr(other) not in done.stdout


def test_no_assert_in_the_package():
    for path in MODULES:
        if path.parent.name == "kernels":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), f"{path}:{node.lineno} uses assert"


def test_modules_stay_short():
    for path in MODULES:
        lines = len(path.read_text().splitlines())
        assert lines <= 500, f"{path} has {lines} lines; split it by meaning"


def test_environment_variables_are_read_in_one_module():
    import re

    for path in MODULES:
        if path.name in {"envs.py", "dispatch.py"}:
            continue
        text = path.read_text()
        assert not re.search(r"environ[^\n]*K3BACKEND_", text), f"{path} reads a variable itself"
