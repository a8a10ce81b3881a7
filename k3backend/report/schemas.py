"""The schema strings of the documents that the commands print."""

from __future__ import annotations

LAYOUT_SCHEMA = "k3backend.layout/1"
LAYOUT_SET_SCHEMA = "k3backend.layout-set/1"
EXPLAIN_SCHEMA = "k3backend.explain/1"
EXPLAIN_SET_SCHEMA = "k3backend.explain-set/1"
DIFF_SCHEMA = "k3backend.diff/1"
FIT_SCHEMA = "k3backend.fit/1"
FIT_SET_SCHEMA = "k3backend.fit-set/1"
PLATFORM_SCHEMA = "k3backend.platform/1"
REPLAY_SCHEMA = "k3backend.replay/1"
KERNELS_SCHEMA = "k3backend.kernels/1"
