"""The same on the spec objects of vLLM 0.32, which have fewer fields (no ``is_draft``)."""

from __future__ import annotations

import pytest

from tests.vllm.test_draft_alignment_033 import *  # noqa: F403

pytestmark = pytest.mark.engine
