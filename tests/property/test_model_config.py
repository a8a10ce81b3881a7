"""Whatever a config.json holds, loading gives a config that can be planned or one InputError."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import k3backend
from k3backend.common.errors import InputError
from k3backend.common.k3_model import Deployment
from k3backend.common.model_config import BUNDLED_DRAFTS, BUNDLED_TARGETS
from k3backend.rocm.mla_specs import build_layer_specs

CONFIGS = Path(k3backend.__file__).parent / "data" / "configs"
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.sampled_from([2**20, 2**40, 2**63, 10**18]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.lists(st.integers(-2, 95), max_size=4),
    st.just({}),
)
REMOVE = object()


def _paths(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and list position of a document."""
    items: Any = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    for key, value in items:
        yield (*path, key)
        yield from _paths(value, (*path, key))


@pytest.mark.parametrize("name", [*BUNDLED_TARGETS, *BUNDLED_DRAFTS])
@given(data=st.data())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_changed_config_loads_or_is_refused_in_one_line(
    name: str, data: st.DataObject, tmp_path: Path
) -> None:
    original = json.loads((CONFIGS / f"{name}.json").read_text())
    document = copy.deepcopy(original)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(sorted(_paths(document), key=str)))
        value = data.draw(st.one_of(VALUES, st.just(REMOVE)))
        inner = document
        for key in path[:-1]:
            inner = inner[key]
        if value is REMOVE:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
    file = tmp_path / "config.json"
    file.write_text(json.dumps(document))
    names = {"draft": str(file)} if name in BUNDLED_DRAFTS else {"target": str(file)}
    try:
        deployment = Deployment.load(**names, tp_size=data.draw(st.sampled_from([1, 2, 8])))
    except InputError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert "\n" not in message
        assert message.startswith("--")
        return
    specs = build_layer_specs(deployment)
    assert len(specs) == len(deployment.layers)
    assert all(spec.page_size_bytes >= spec.real_page_size_bytes for spec in specs.values())
