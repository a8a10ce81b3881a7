"""Benches for the workers of gpu_check.py that do what their entries say. Imports no torch."""

from __future__ import annotations

import os
import time
from typing import Any

from tools.gpu_workers import DEVICE_LOST

RIGHT = {"ok": True, "message": "", "seconds": 0.0}
ROW = {"decode_us": 10.0, "warm_us": 9.0, "gb_s": 1000.0, "tflop_s": 1.0, "timed": "graph"}


class ScriptedBench:
    """Entries are "<section> <what happens> [anything]"."""

    def __init__(self) -> None:
        self.facts = {"name": "a script", "arch": "none", "pid": os.getpid()}
        self.lost = False

    def run(self, name: str) -> dict[str, Any]:
        section, _, rest = name.partition(" ")
        what = rest.split()[0].removesuffix(":") if rest else "works"
        if self.lost:
            raise AssertionError("an entry was given to a worker whose device is lost")
        if what == "hangs":
            time.sleep(600)
        if what == "dies":
            os._exit(7)
        if what == "raises":
            raise RuntimeError("first line\nsecond line")
        if what == "lost":
            self.lost = True
            return {"why_not": "AcceleratorError: illegal memory access", DEVICE_LOST: True}
        if what == "slow":
            time.sleep(1.0)
        if section == "check":
            found = {"name": rest, "pid": os.getpid(), **RIGHT}
            return found | ({"ok": False, "message": "off by 1"} if what == "wrong" else {})
        if section == "copy":
            return {"copy_bytes_s": 2_000_000_000_000}
        if section == "compile":
            return {"nan": False}
        if what == "wrong":
            return {key: ROW[key] for key in ("decode_us", "warm_us", "timed")} | {
                "wrong": "a row is 1 off float32"
            }
        return dict(ROW)


def open_script() -> ScriptedBench:
    """Always opens."""
    return ScriptedBench()


def open_nothing() -> ScriptedBench:
    """Refuses."""
    raise OSError("no device of this kind")


def open_dead() -> ScriptedBench:
    """Dies while it opens."""
    os._exit(9)
