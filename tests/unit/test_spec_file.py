"""Spec files: what they say, what is refused, and the way back."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from k3backend.common import kv_spec as ks
from k3backend.common.errors import InputError
from k3backend.common.plan_context import KernelBlocks, PlanContext
from k3backend.common.spec_file import (
    SpecFile,
    dump_spec_document,
    load_spec_file,
    parse_spec_document,
)
from tests.helpers.random_specs import random_document
from tests.unit.test_kv_spec import EXAMPLES

CASES = sorted((Path(__file__).parents[1] / "data" / "planning").glob("*.json"))
DOCUMENT: dict[str, Any] = {
    "schema": "k3backend.specs/1",
    "layout": "BLHNC",
    "tp_size": 8,
    "dcp_size": 2,
    "max_model_len": 100_000,
    "context": 60_000,
    "max_in_flight_tokens": 4096,
    "mamba_cache_mode": "none",
    "mla_kernel_block": "multiple:64",
    "draft_kernel_block": "16,32",
    "prefix_caching": False,
    "disable_hybrid_kv_cache_manager": True,
    "max_num_encoder_input_tokens": 1500,
    "available_bytes": 1 << 34,
    "layers": [
        {
            "count": 2,
            "prefix": "kda.",
            "kind": "mamba",
            "block_size": 1536,
            "shapes": [[4608, 10], [12, 128, 128]],
            "dtypes": ["bfloat16", "float32"],
            "mamba_type": "GDN_ATTN",
        },
        {
            "count": 1,
            "prefix": "mla.",
            "kind": "mla_attention",
            "stage": 1,
            "block_size": 1536,
            "num_kv_heads": 1,
            "head_size": 576,
            "dtype": "uint8",
            "cache_dtype_str": "fp8",
            "kv_quant_mode": "FP8_PER_TENSOR",
            "cache_role": "INDEXER",
            "block_stride_alignment": {"multiple_of": 64},
            "max_tp_shards": 1,
        },
        {
            "count": 1,
            "prefix": "draft.",
            "kind": "full_attention",
            "stage": 1,
            "is_draft": True,
            "block_size": 16,
            "num_kv_heads": 2,
            "head_size": 64,
            "dtype": "bfloat16",
            "tokens_per_state": "1/4",
            "block_stride_alignment": 512,
            "max_tp_shards": None,
        },
    ],
}


def test_a_document_becomes_specs() -> None:
    file = parse_spec_document(DOCUMENT)
    assert list(file.specs) == ["kda.0", "kda.1", "mla.0", "draft.0"]
    assert file.stages == {"kda.0": 0, "kda.1": 0, "mla.0": 1, "draft.0": 1}
    assert file.available_bytes == 1 << 34
    assert file.context == PlanContext(
        layout="BLHNC",
        tp_size=8,
        dcp_size=2,
        pp_size=2,
        max_model_len=100_000,
        context=60_000,
        max_in_flight_tokens=4096,
        mamba_cache_mode="none",
        mla_kernel_block=KernelBlocks(multiple_of=64),
        draft_kernel_block=KernelBlocks(sizes=(16, 32)),
        prefix_caching=False,
        disable_hybrid_kv_cache_manager=True,
        max_num_encoder_input_tokens=1500,
    )
    assert file.specs["kda.1"] == ks.MambaSpec(
        block_size=1536,
        shapes=((4608, 10), (12, 128, 128)),
        dtypes=("bfloat16", "float32"),
        mamba_type=ks.MambaType.GDN_ATTN,
    )
    assert file.specs["mla.0"] == ks.MLAAttentionSpec(
        block_size=1536,
        num_kv_heads=1,
        head_size=576,
        dtype="uint8",
        cache_dtype_str="fp8",
        kv_quant_mode=ks.KVQuantMode.FP8_PER_TENSOR,
        cache_role=ks.SparseCacheRole.INDEXER,
        block_stride_alignment=ks.MultipleOf(64),
        max_tp_shards=1,
    )
    draft = file.specs["draft.0"]
    assert draft.is_draft
    assert draft.tokens_per_state == Fraction(1, 4)
    assert draft.block_stride_alignment == 512


def test_defaults_are_the_specs_and_the_contexts() -> None:
    layer = {"prefix": "l", "kind": "full_attention", "block_size": 16}
    layer |= {"num_kv_heads": 1, "head_size": 64, "dtype": "bfloat16"}
    file = parse_spec_document(
        {"schema": "k3backend.specs/1", "max_model_len": 10, "layers": [layer]}
    )
    assert file == SpecFile(
        {"l0": ks.FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype="bfloat16")},
        PlanContext(max_model_len=10),
        {"l0": 0},
        None,
    )


def _round_trip(file: SpecFile) -> SpecFile:
    document = dump_spec_document(file.specs, file.context, file.stages, file.available_bytes)
    return parse_spec_document(json.loads(json.dumps(document)))


def _assert_same(left: SpecFile, right: SpecFile) -> None:
    assert left == right
    assert list(left.specs) == list(right.specs)
    drafts = [[spec.is_draft for spec in file.specs.values()] for file in (left, right)]
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_the_public_cases_survive_a_round_trip(case: Path) -> None:
    file = parse_spec_document(json.loads(case.read_text())["specs"], case.name)
    _assert_same(_round_trip(file), file)


def test_random_documents_survive_a_round_trip() -> None:
    read = 0
    for seed in range(300):
        try:
            file = parse_spec_document(random_document(seed))
        except InputError:
            continue  # a padding smaller than the page, or a block smaller than a state
        _assert_same(_round_trip(file), file)
        read += 1
    assert read > 200


def test_every_kind_survives_a_round_trip() -> None:
    file = SpecFile(dict(EXAMPLES), PlanContext(max_model_len=10), dict.fromkeys(EXAMPLES, 0), None)
    assert {ks.spec_kind_name(spec) for spec in file.specs.values()} == set(ks.SPEC_CLASSES)
    _assert_same(_round_trip(file), file)


def test_a_dump_is_short_and_names_what_has_no_index() -> None:
    file = parse_spec_document(DOCUMENT)
    layers = dump_spec_document(file.specs, file.context, file.stages)["layers"]
    assert [layer.get("prefix") for layer in layers] == ["kda.", "mla.", "draft."]
    assert layers[0] == {**DOCUMENT["layers"][0]}
    spec = file.specs["mla.0"]
    live = {"model.layers.3.self_attn.attn": spec, "model.layers.7.self_attn.attn": spec}
    document = dump_spec_document(live, file.context)
    assert document["layers"][0]["names"] == list(live)
    assert parse_spec_document(document).specs == live


def test_a_spec_that_the_schema_lacks_is_not_dumped() -> None:
    hot = ks.HiSparseHotSpec(block_size=16, page_size=1, blocks_per_request=1)
    with pytest.raises(
        InputError, match="layer a has a HiSparseHotSpec, expected one of the kinds"
    ):
        dump_spec_document({"a": hot}, PlanContext(max_model_len=1))


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def _delete(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_delete("schema"), "schema is null, expected"),
        (_set("schema", value="k3backend.specs/2"), 'schema is "k3backend.specs/2", expected'),
        (_set("colour", value=1), "colour is not known here; the fields are schema"),
        (_set("pp_size", value=2), "pp_size is not known here"),
        (_delete("max_model_len"), "max_model_len is missing"),
        (_set("max_model_len", value=0), "max_model_len is 0, expected an integer from 1"),
        (_set("max_model_len", value=True), "max_model_len is True"),
        (_set("max_model_len", value=None), "max_model_len is None"),
        (_set("max_model_len", value=1 << 60), "max_model_len is 1152921504606846976, expected an"),
        (_set("layout", value="LNBHC"), "layout is 'LNBHC', expected one of LBNHC"),
        (_set("layout", value=["LBNHC"]), "layout is ['LBNHC'], expected one of"),
        (_set("tp_size", value=-8), "tp_size is -8"),
        (_set("context", value=100_001), "context is 100001, expected at most max_model_len"),
        (_set("mamba_cache_mode", value="some"), "mamba_cache_mode is 'some'"),
        (_set("mla_kernel_block", value="x"), "mla_kernel_block: kernel blocks 'x'"),
        (_set("mla_kernel_block", value=64), "mla_kernel_block is 64"),
        (_set("prefix_caching", value="on"), "prefix_caching is 'on', expected True or False"),
        (_set("available_bytes", value=0), "available_bytes is 0, expected an integer from 1"),
        (_set("available_bytes", value=-5), "available_bytes is -5"),
        (_set("available_bytes", value=1.5), "available_bytes is 1.5"),
        (_delete("layers"), "layers is null, expected a list"),
        (_set("layers", value=[]), "layers is [], expected a list of at least one entry"),
        (_set("layers", value={}), "layers is {}, expected a list"),
        (_set("layers", 1, value="mla"), 'layers[1] is "mla", expected a JSON object'),
        (_delete("layers", 0, "kind"), "layers[0].kind is null, expected one of full_attention"),
        (_set("layers", 0, "kind", value="kda"), 'layers[0].kind is "kda", expected one of'),
        (_set("layers", 0, "kind", value=["mamba"]), 'layers[0].kind is ["mamba"]'),
        (_set("layers", 0, "colour", value=1), "layers[0].colour is not known here"),
        (_set("layers", 0, "num_kv_heads", value=1), "layers[0].num_kv_heads is not known here"),
        (_delete("layers", 1, "head_size"), "layers[1].head_size is missing; a mla_attention"),
        (_delete("layers", 0, "shapes"), "layers[0].shapes is missing"),
        (_set("layers", 2, "block_size", value=-16), "layers[2].block_size is -16, expected an"),
        (_set("layers", 2, "block_size", value=0), "layers[2].block_size is 0"),
        (_set("layers", 2, "block_size", value=True), "layers[2].block_size is True"),
        (_set("layers", 2, "block_size", value="16"), "layers[2].block_size is '16'"),
        (_set("layers", 2, "block_size", value=16.0), "layers[2].block_size is 16.0"),
        (_set("layers", 2, "block_size", value=None), "layers[2].block_size is None"),
        (_set("layers", 2, "block_size", value=[16]), "layers[2].block_size is [16]"),
        (
            _set("layers", 2, "block_size", value=1 << 51),
            "layers[2].block_size is 2251799813685248",
        ),
        (_set("layers", 2, "block_size", value=1 << 45), "layers[2].block_size: a page takes"),
        (_set("layers", 2, "dtype", value="fp8"), "layers[2].dtype: dtype 'fp8' is not known"),
        (_set("layers", 2, "dtype", value=8), "layers[2].dtype is 8, expected the name of a torch"),
        (_set("layers", 0, "dtypes", value=["bfloat16"]), "layers[0].dtypes is ("),
        (_set("layers", 0, "dtypes", 1, value=None), "layers[0].dtypes[1] is null"),
        (_set("layers", 0, "dtypes", value="bfloat16"), "layers[0].dtypes is 'bfloat16'"),
        (_set("layers", 0, "shapes", 0, 1, value=0), "layers[0].shapes[0][1] is 0"),
        (_set("layers", 0, "shapes", 1, value=3), "layers[0].shapes is ["),
        (_set("layers", 1, "kv_quant_mode", value="FP9"), 'layers[1].kv_quant_mode is "FP9"'),
        (_set("layers", 1, "kv_quant_mode", value=1), "layers[1].kv_quant_mode is 1"),
        (_set("layers", 1, "cache_role", value="both"), 'layers[1].cache_role is "both"'),
        (_set("layers", 0, "mamba_type", value="kda"), 'layers[0].mamba_type is "kda"'),
        (_set("layers", 0, "mamba_cache_mode", value=1), "layers[0].mamba_cache_mode is 1"),
        (
            _set("layers", 1, "block_stride_alignment", value={"multiple": 64}),
            'layers[1].block_stride_alignment is {"multiple": 64}',
        ),
        (
            _set("layers", 1, "block_stride_alignment", "multiple_of", value=0),
            "layers[1].block_stride_alignment.multiple_of is 0",
        ),
        (_set("layers", 1, "block_stride_alignment", value="64"), "layers[1].block_stride_align"),
        (_set("layers", 2, "tokens_per_state", value="1/0"), 'layers[2].tokens_per_state is "1/0"'),
        (_set("layers", 2, "tokens_per_state", value="3/2"), "layers[2].tokens_per_state is Fract"),
        (_set("layers", 2, "tokens_per_state", value=0.25), "layers[2].tokens_per_state is 0.25"),
        (_set("layers", 2, "tokens_per_state", value=-1), "layers[2].tokens_per_state is -1"),
        (_set("layers", 1, "page_size_padded", value=5), "layers[1].page_size_padded is 5, expect"),
        (_set("layers", 2, "is_draft", value=1), "layers[2].is_draft is 1, expected True or False"),
        (_set("layers", 2, "sliding_window", value=0), "layers[2].sliding_window is 0"),
        *(
            (
                _set("layers", layer, field, value=(1 << 20) + 1),
                f"layers[{layer}].{field} is 1048577, expected at most 1048576",
            )
            for layer, field in (
                (0, "num_speculative_blocks"),
                (0, "num_prefill_checkpoint_blocks"),
                (0, "num_heads"),
                (1, "num_kv_heads"),
                (1, "num_head_slots"),
                (2, "max_tp_shards"),
            )
        ),
        (_set("layers", 1, "count", value=0), "layers[1].count is 0, expected an integer >= 1"),
        (_set("layers", 1, "count", value=10**9), "layers[1].count is 1000000000"),
        (_set("layers", 1, "count", value="2"), 'layers[1].count is "2"'),
        (_set("layers", 1, "count", value=True), "layers[1].count is true"),
        (_delete("layers", 1, "prefix"), "layers[1].prefix is null, expected a non-empty string"),
        (_set("layers", 1, "prefix", value=7), "layers[1].prefix is 7"),
        (_set("layers", 1, "prefix", value="a\nb"), 'layers[1].prefix is "a\\nb"'),
        (_set("layers", 1, "prefix", value="kda."), 'layers[1]: layer name "kda.0" is used twice'),
        (_set("layers", 1, "names", value=["a"]), 'layers[1].names is ["a"], expected a list'),
        (_set("layers", 1, "stage", value=-1), "layers[1].stage is -1, expected an integer >= 0"),
        (_set("layers", 1, "stage", value=3), "layers: pipeline stage 2 is out of line"),
        (_set("layers", 1, "stage", value=10**30), "layers[1].stage is 1000000000"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_path(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    document = copy.deepcopy(DOCUMENT)
    change(document)
    with pytest.raises(InputError) as caught:
        parse_spec_document(document, "model.json")
    text = str(caught.value)
    assert text.startswith(f"model.json: {message}"), text
    assert "\n" not in text


@pytest.mark.parametrize("document", [None, [], 3, "x", True])
def test_a_document_is_an_object(document: object) -> None:
    with pytest.raises(InputError, match=r"the document is .*, expected a JSON object"):
        parse_spec_document(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty; give"),
        (b"  \n", "is empty; give"),
        (json.dumps(DOCUMENT).encode()[:-40], "is not JSON"),
        (b"{'schema': 1}", "is not JSON"),
        (b"\xff\xfe{", "is not UTF-8 text"),
        (b'{"max_model_len": NaN}', "holds NaN, which is not a number"),
        (b'{"tp_size": 1, "tp_size": 2}', "repeats the key 'tp_size'"),
        (b'{"tp_size": ' + b"9" * 5000 + b"}", "holds an integer of 5000 digits"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"layers": []} {}', "is not JSON"),
        (b"[1]", "holds a JSON array, not an object"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "specs.json"
    path.write_bytes(text)
    with pytest.raises(InputError) as caught:
        load_spec_file(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_spec_file(tmp_path / "absent.json")
    with pytest.raises(InputError, match="is a directory"):
        load_spec_file(tmp_path)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "specs.json"
    path.write_text(json.dumps(DOCUMENT))
    assert load_spec_file(str(path)) == parse_spec_document(DOCUMENT)
