"""A folder's files joined into one index: which files are opened, and where names, index and files disagree."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoints import (
    INDEX,
    expected,
    file_of,
    index_of,
    rank_file,
    raw_file,
    sharded,
    stored,
    tensor,
)

from shardferry.errors import CheckpointChangedError, CheckpointNotFoundError
from shardferry.format.checkpoint import check_file, read_checkpoint
from shardferry.format.hubindex import MAX_INDEX_BYTES
from shardferry.format.index import CheckpointIndex, FileInfo
from shardferry.format.problem import Problem, refusal, remarks
from shardferry.storage.files import MemoryFiles

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
WEIGHT, BIAS, HEAD = tensor("enc.weight", "BF16", (4, 3)), tensor("enc.bias", "F32", (3,)), tensor("head", "I8", (5,))
SET = sharded({ONE: [WEIGHT], TWO: [BIAS, HEAD]})
ALL = [WEIGHT, BIAS, HEAD]


@dataclass
class RecordingFiles:
    """Files in memory that remember which were read."""

    contents: dict[str, bytes]
    root: str = "memory"
    opened: set[str] = field(default_factory=set)
    concurrency: int = 8

    def version(self, name: str) -> str:
        return f"version of {name}"

    def names(self) -> tuple[str, ...]:
        return MemoryFiles(self.contents).names()

    def size(self, name: str) -> int:
        return MemoryFiles(self.contents).size(name)

    def read(self, name: str, start: int, stop: int) -> bytes:
        self.opened.add(name)
        return MemoryFiles(self.contents).read(name, start, stop)


def read(
    contents: dict[str, bytes], entry: str | None = None, variant: str | None = None
) -> tuple[CheckpointIndex, list[Problem]]:
    return read_checkpoint(MemoryFiles(contents), entry, variant)


def said(contents: dict[str, bytes], *severities: str, entry: str | None = None, variant: str | None = None) -> str:
    _, problems = read(contents, entry, variant)
    return "\n".join(problem.message for problem in problems if problem.severity in severities)


@pytest.mark.parametrize(
    ("contents", "entry", "variant"),
    [
        (SET, None, None),
        (SET, INDEX, None),
        ({name: SET[name] for name in (ONE, TWO)}, None, None),
        (sharded({"sub/a.safetensors": [WEIGHT, HEAD], "layers-7.safetensors": [BIAS]}), None, None),
        ({"model.safetensors": file_of(ALL)}, None, None),
        ({"whatever.safetensors": file_of(ALL)}, None, None),
        ({"whatever.safetensors": file_of(ALL), "x.bin": b"?"}, "whatever.safetensors", None),
        ({"diffusion_pytorch_model.safetensors": file_of(ALL)}, None, None),
        ({"adapter_model.safetensors": file_of(ALL), "adapter_config.json": b"{}"}, None, None),
        ({"model.safetensors": b"", "model.ema.safetensors": file_of(ALL)}, None, "ema"),
        ({"model.ema-00001-of-00001.safetensors": file_of(ALL)}, None, "ema"),
        ({"model-00001-of-00001.ema.safetensors": file_of(ALL)}, None, "ema"),
        ({"unet.ema.safetensors": file_of(ALL), "unet.safetensors": b""}, None, "ema"),
        (
            {
                "model.ema-00001-of-00001.safetensors": file_of(ALL),
                "model.safetensors.index.ema.json": index_of(
                    {one.name: "model.ema-00001-of-00001.safetensors" for one in ALL}
                ),
            },
            None,
            "ema",
        ),
        ({"model-00000-of-00002.safetensors": SET[ONE], "model-00001-of-00002.safetensors": SET[TWO]}, None, None),
    ],
    ids=[
        "folder with an index",
        "index file",
        "complete set without index",
        "any names below the folder",
        "single file",
        "single file of another name",
        "named file",
        "diffusers",
        "adapter",
        "variant",
        "numbered variant",
        "numbered variant, old order",
        "variant of another name",
        "variant with an index",
        "numbers from zero",
    ],
)
def test_every_kind_of_checkpoint_is_read_whole(
    contents: dict[str, bytes], entry: str | None, variant: str | None
) -> None:
    index, problems = read(contents, entry, variant)
    assert problems == []
    assert stored(index, contents) == expected(ALL)


def test_file_information_is_what_identifies_the_header() -> None:
    index, _ = read(SET)
    assert index.files[ONE].size == len(SET[ONE])
    check_file(MemoryFiles(SET), ONE, index.files[ONE])


def test_a_file_of_another_size_is_not_the_one_that_was_indexed() -> None:
    index, _ = read(SET)
    changed = MemoryFiles(SET | {ONE: SET[ONE] + b"x"})
    with pytest.raises(CheckpointChangedError, match=rf"{ONE}.*another revision.*the same path, or fetch"):
        check_file(changed, ONE, index.files[ONE])


def test_a_file_of_another_header_is_not_the_one_that_was_indexed() -> None:
    index, _ = read(SET)
    changed = MemoryFiles(SET | {ONE: SET[ONE].replace(b"weight", b"weighs")})
    with pytest.raises(CheckpointChangedError, match=rf"{ONE}.*header.*another revision.*the same path, or fetch"):
        check_file(changed, ONE, index.files[ONE])


def test_a_file_that_is_absent_on_this_node_is_said_to_be() -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"gone\.safetensors is missing"):
        check_file(MemoryFiles({}), "gone.safetensors", FileInfo(1, 1, ""))


def test_metadata_of_all_files_is_merged_and_the_first_file_wins() -> None:
    contents = {ONE: file_of([WEIGHT], {"a": "1", "b": "1"}), TWO: file_of([HEAD], {"b": "2", "c": "2"})}
    assert read(contents)[0].metadata == {"a": "1", "b": "1", "c": "2"}


@pytest.mark.parametrize(
    "beside", ["consolidated.safetensors", ".git/model.safetensors", "original/a.safetensors", "pytorch_model.bin"]
)
def test_with_an_index_nothing_but_the_files_it_names_is_opened(beside: str) -> None:
    files = RecordingFiles(SET | {beside: b"junk"})
    _, problems = read_checkpoint(files, None, None)
    assert (files.opened, problems) == ({INDEX, ONE, TWO}, [])


def test_other_variants_beside_a_checkpoint_are_not_opened() -> None:
    files = RecordingFiles(
        {"model.safetensors": file_of(ALL), "model.fp16.safetensors": b"junk", "ema.safetensors": b""}
    )
    _, problems = read_checkpoint(files, None, None)
    assert (files.opened, problems) == ({"model.safetensors"}, [])


@pytest.mark.parametrize("stray", ["model-00003-of-00003.safetensors", "other-00001-of-00002.safetensors"])
def test_a_numbered_file_the_index_does_not_name_is_not_opened_but_fails_a_check(stray: str) -> None:
    files = RecordingFiles(SET | {stray: b"junk"})
    _, problems = read_checkpoint(files, None, None)
    assert stray not in files.opened
    assert [(problem.severity, problem.file) for problem in problems] == [("verify", stray)]
    assert stray in remarks(problems)[0]


def test_a_numbered_set_left_beside_a_single_file_fails_a_check() -> None:
    assert ONE in said({"model.safetensors": file_of(ALL), ONE: b"junk"}, "verify")


@pytest.mark.parametrize(
    "beside",
    [
        {"model.fp16-00001-of-00009.safetensors": b""},
        {"model-00001-of-00009.fp16.safetensors": b""},
        {"old-00001-of-00002.safetensors": b"", "old.safetensors.index.json": b"{}"},
    ],
    ids=["variant", "variant, old order", "a set with its own index"],
)
def test_numbered_files_that_belong_to_something_else_are_no_strays(beside: dict[str, bytes]) -> None:
    assert read(SET | beside)[1] == []


def test_a_single_file_beside_an_index_must_be_chosen_by_the_caller() -> None:
    contents = SET | {"model.safetensors": file_of([HEAD])}
    message = said(contents, "fatal")
    assert "model.safetensors " in message
    assert INDEX in message
    assert stored(read(contents, INDEX)[0], contents) == expected(ALL)
    assert stored(read(contents, "model.safetensors")[0], contents) == expected([HEAD])


def test_several_unknown_indexes_must_be_chosen_from() -> None:
    indexes = {name: index_of({}) for name in ("a.safetensors.index.json", "b.safetensors.index.json")}
    assert all(name in said(indexes, "fatal") for name in indexes)


def test_files_of_two_libraries_in_one_folder_are_remarked_on() -> None:
    contents = {"model.safetensors": file_of([HEAD]), "diffusion_pytorch_model.safetensors": file_of([BIAS])}
    assert "diffusion_pytorch_model" in said(contents, "warning")


@pytest.mark.parametrize(
    ("contents", "variant", "words"),
    [
        ({"config.json": b"{}"}, None, ["no safetensors file", "model.safetensors"]),
        ({"pytorch_model.bin": b""}, None, ["no safetensors file", "pytorch_model.bin", "convert"]),
        ({"model.fp16.safetensors": b""}, None, ["no safetensors file", "variant fp16"]),
        ({"model.safetensors": b""}, "bf16", ["no safetensors file", "model.bf16.safetensors"]),
        ({"snapshots/r/model.safetensors": b""}, None, ["no safetensors file", "snapshots/"]),
    ],
    ids=["nothing", "pickles", "only a variant", "not this variant", "above a snapshot"],
)
def test_a_folder_without_a_checkpoint_says_what_was_looked_for(
    contents: dict[str, bytes], variant: str | None, words: list[str]
) -> None:
    _, problems = read(contents, variant=variant)
    error = refusal(problems, "here", strict=False)
    assert isinstance(error, CheckpointNotFoundError)
    assert all(word in str(error) for word in words)


def test_all_absent_files_of_an_index_are_named_at_once() -> None:
    more = index_of({"enc.weight": ONE, "x": "m-7.safetensors", "y": "m-9.safetensors"})
    message = said({ONE: SET[ONE], INDEX: more}, "missing")
    assert "m-7.safetensors is missing" in message
    assert "m-9.safetensors is missing" in message


def test_all_absent_numbers_of_an_unindexed_set_are_named_at_once() -> None:
    names = [f"model-{number:05d}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    message = said({names[1]: file_of(ALL)}, "missing")
    assert all((name in message) == (name != names[1]) for name in names)


def test_an_absurd_total_in_a_file_name_takes_no_time() -> None:
    assert said({"model-1-of-999999999.safetensors": file_of(ALL)}, "missing")


def test_files_of_two_sets_are_not_mixed() -> None:
    assert "several sets" in said({ONE: SET[ONE], "model-00002-of-00003.safetensors": SET[TWO]}, "fatal")


def test_a_name_in_two_unindexed_files_is_refused_with_both_files() -> None:
    copy = file_of([tensor("head", "I8", (5,), seed=1), tensor("enc.bias", "F32", (3,), seed=1)])
    message = said({ONE: SET[ONE], TWO: SET[TWO], "copy.safetensors": copy}, "fatal")
    assert message.count("duplicate") == 2
    assert all(word in message for word in ("head", "enc.bias", "copy.safetensors", TWO))


def test_a_name_in_two_indexed_files_is_read_where_the_index_says_without_strictness() -> None:
    contents = SET | {ONE: file_of([WEIGHT, tensor("head", "I8", (5,), seed=1)])}
    index, problems = read(contents)
    error = refusal(problems, "here", strict=True)
    assert all(word in str(error) for word in ("head", "duplicate", ONE, TWO, "--no-strict"))
    assert refusal(problems, "here", strict=False) is None
    assert stored(index, contents) == expected(ALL)


def test_a_name_the_index_puts_in_the_wrong_file_is_read_from_the_right_one_without_strictness() -> None:
    contents = SET | {INDEX: index_of({"enc.weight": ONE, "enc.bias": TWO, "head": ONE})}
    index, problems = read(contents)
    assert all(word in str(refusal(problems, "here", strict=True)) for word in ("head", ONE, TWO, "strict=False"))
    assert refusal(problems, "here", strict=False) is None
    assert stored(index, contents) == expected(ALL)


def test_a_name_no_file_holds_is_refused() -> None:
    contents = SET | {INDEX: index_of({"enc.weight": ONE, "enc.bias": TWO, "head": TWO, "ghost": TWO})}
    assert all(word in said(contents, "strict") for word in ("ghost", TWO, "missing"))


def test_names_the_index_does_not_list_are_read_and_remarked_on() -> None:
    contents = SET | {INDEX: index_of({"enc.weight": ONE, "enc.bias": TWO})}
    index, problems = read(contents)
    assert stored(index, contents) == expected(ALL)
    assert [problem.severity for problem in problems] == ["warning"]
    assert "head" in problems[0].message


@pytest.mark.parametrize("total", [7, 7.5, "41", None])
def test_a_wrong_total_size_is_a_remark(total: object) -> None:
    weight_map = {"enc.weight": ONE, "enc.bias": TWO, "head": TWO}
    message = said(SET | {INDEX: index_of(weight_map, total_size=total)}, "warning")
    assert message == "" if total is None else ("total_size" in message and str(total) in message)


def test_an_index_without_metadata_is_read() -> None:
    contents = {ONE: SET[ONE], INDEX: b'{"weight_map": {"enc.weight": "./%s"}}' % ONE.encode()}
    index, problems = read(contents)
    assert (stored(index, contents), problems) == (expected([WEIGHT]), [])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"weight_map": {', ["JSON"]),
        (b"version https://git-lfs.github.com/spec/v1\nsize 9\n", ["LFS"]),
        (b"[]", ["object"]),
        (b"{}", ["weight_map", "absent"]),
        (b'{"weight_map": ["x"]}', ["weight_map", "an array"]),
        (index_of({"enc.weight": 3}), ["enc.weight", "string"]),
        (index_of({"enc.weight": f"../up/{ONE}"}), ["enc.weight", "..", "leads out"]),
        (index_of({"enc.weight": f"a\\..\\..\\{ONE}"}), ["enc.weight", "leads out"]),
        (index_of({"enc.weight": "/srv/w.safetensors"}), ["/srv/w.safetensors", "absolute"]),
        (index_of({"enc.weight": "C:\\w.safetensors"}), ["absolute"]),
        (index_of({"enc.weight": "a\0.safetensors"}), ["enc.weight", "character"]),
        (index_of({"enc.weight": "model.bin"}), ["model.bin", ".safetensors"]),
        (index_of({"enc.weight": "x.SafeTensors"}), [".safetensors"]),
        (b'{"weight_map": {"enc.weight": "%s", "enc.weight": "b.safetensors"}}' % ONE.encode(),
         ["duplicate", "enc.weight"]),
        (bytes(MAX_INDEX_BYTES + 1), ["cap", str(MAX_INDEX_BYTES)]),
    ],
    ids=[
        "cut", "git lfs", "list", "no map", "map a list", "file a number", "up", "up, windows", "absolute",
        "drive", "nul", "ending", "ending's case", "twins", "too big",
    ],
)  # fmt: skip
def test_a_bad_index_is_refused_with_its_cause(content: bytes, words: list[str]) -> None:
    message = said({ONE: SET[ONE], INDEX: content}, "fatal", "strict")
    assert all(word in message for word in [INDEX, *words]), message


def test_an_index_that_is_not_there_is_missing() -> None:
    assert "x.json is missing" in said({}, "missing", entry="x.json")


@pytest.mark.parametrize(
    ("content", "words"), [(b"version https://git-lfs.github.com/spec/v1\n", ["LFS"]), (SET[TWO][:-3], ["truncated"])]
)
def test_one_bad_shard_file_is_named(content: bytes, words: list[str]) -> None:
    message = said(SET | {TWO: content}, "fatal")
    assert all(word in message for word in [TWO, *words])


def test_names_in_a_file_whose_header_is_wrong_are_not_called_missing() -> None:
    broken = raw_file(
        {"enc.bias": {"dtype": "F32"}, "head": {"dtype": "I9", "shape": [1], "data_offsets": [0, 1]}}, b"x"
    )
    assert said(SET | {TWO: broken}, "strict", "missing") == ""


def test_a_problem_of_one_file_does_not_hide_those_of_others() -> None:
    contents = SET | {ONE: b"", TWO: raw_file({"head": None})}
    message = said(contents, "fatal")
    assert ONE in message
    assert TWO in message


# Rank files: PyTorch's distributed writer.

RANKS = [f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in (1, 2, 3, 4)]


def boxes(*placed: tuple[tuple[int, int], tuple[int, int]]) -> dict[str, bytes]:
    """Return a file per box, given where it begins and its shape."""
    return {
        RANKS[rank]: rank_file((tensor("w", "F32", shape, seed=rank), begin))
        for rank, (begin, shape) in enumerate(placed)
    }


def test_boxes_of_rank_files_make_up_the_tensor() -> None:
    whole = tensor("w", "I16", (5, 7))
    rows, columns = [(0, 3), (3, 5)], [(0, 4), (4, 7)]
    contents = {}
    for rank, ((top, bottom), (left, right)) in enumerate((r, c) for r in rows for c in columns):
        data = b"".join(whole.data[2 * (7 * row + left) : 2 * (7 * row + right)] for row in range(top, bottom))
        box = whole._replace(shape=(bottom - top, right - left), data=data)
        contents[RANKS[rank]] = rank_file((box, (top, left)))
    index, problems = read(contents)
    assert problems == []
    assert stored(index, contents) == expected([whole])
    assert index.tensors["w"].file == index.tensors["w"].parts[0].file
    assert "DCP_SHARDING_INFO" not in index.metadata


def test_a_tensor_in_one_box_has_no_parts() -> None:
    contents = {RANKS[0]: rank_file((BIAS, (0,)), (HEAD, (0,)))}
    index, problems = read(contents)
    assert problems == []
    assert [info.parts for info in index.tensors.values()] == [(), ()]


def test_an_empty_box_is_no_part() -> None:
    index, problems = read(boxes(((0, 0), (2, 3)), ((2, 0), (0, 3))))
    assert problems == []
    assert (index.tensors["w"].shape, index.tensors["w"].parts) == ((2, 3), ())


@pytest.mark.parametrize(
    "placed",
    [
        [((0, 0), (2, 3)), ((5, 0), (2, 3))],
        [((1, 0), (2, 3))],
        [((0, 0), (2, 3)), ((2, 0), (2, 2))],
        [((0, 0), (1, 1)), ((1, 1), (1, 1))],
    ],
    ids=["between", "before", "ragged", "diagonal"],
)
def test_a_gap_between_boxes_is_refused(placed: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    assert all(word in said(boxes(*placed), "fatal") for word in ("'w'", "gap"))


@pytest.mark.parametrize(
    "placed",
    [
        [((0, 0), (2, 3)), ((0, 0), (2, 3))],
        [((0, 0), (3, 3)), ((2, 0), (2, 3))],
        [((0, 0), (2, 2)), ((1, 1), (2, 2)), ((0, 2), (1, 1))],
    ],
    ids=["same", "rows", "corner"],
)
def test_overlapping_boxes_are_refused(placed: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    assert all(word in said(boxes(*placed), "fatal") for word in ("'w'", "overlap"))


def test_boxes_off_any_grid_are_told_from_overlapping_ones() -> None:
    _, problems = read(boxes(((0, 0), (2, 2)), ((0, 2), (3, 1)), ((2, 0), (1, 2))))
    assert problems == []


def test_boxes_of_two_dtypes_are_refused() -> None:
    contents = boxes(((0, 0), (2, 2)))
    contents[RANKS[1]] = rank_file((tensor("w", "F16", (2, 2)), (2, 0)))
    assert all(word in said(contents, "fatal") for word in ("F32", "F16", *RANKS[:2]))


@pytest.mark.parametrize(
    "info",
    ["no json", "{}", '{"w":{}}', '{"w":[0,0]}', '{"w":{"saved_offsets":[0]}}', '{"w":{"saved_offsets":[0,-1]}}',
     '{"w":{"saved_offsets":[0,0]},"w":{"saved_offsets":[0,0]}}'],
)  # fmt: skip
def test_sharding_information_that_places_nothing_is_refused(info: str) -> None:
    contents = {RANKS[0]: file_of([tensor("w", "F32", (2, 2))], {"DCP_SHARDING_INFO": info})}
    assert "DCP_SHARDING_INFO" in said(contents, "fatal")


def test_rank_files_without_sharding_information_are_refused() -> None:
    assert "DCP_SHARDING_INFO" in said({RANKS[0]: file_of(ALL)}, "fatal")


def test_whole_tensors_and_boxes_may_stand_side_by_side() -> None:
    contents = {"a.safetensors": file_of([BIAS]), "b.safetensors": rank_file((HEAD, (0,)))}
    index, problems = read(contents)
    assert (stored(index, contents), problems) == (expected([BIAS, HEAD]), [])


def test_an_output_file_to_which_no_rank_file_belongs_is_missing() -> None:
    name = "shard-00002-model-00003-of-00003.safetensors"
    message = said({name: rank_file((BIAS, (0,)))}, "missing")
    assert all(f"shard-*-model-0000{number}-of-00003" in message for number in (1, 2))


def test_the_file_of_one_rank_alone_is_not_taken_for_the_tensor() -> None:
    contents = boxes(((0, 0), (2, 3)), ((2, 0), (2, 3)))
    assert "gap" in said(contents, "fatal", entry=RANKS[1])


# Damage: whatever the bytes, problems are returned, never raised.

INTACT = SET | {RANKS[0]: rank_file((HEAD, (0,)))}
damages = st.lists(st.tuples(st.sampled_from(sorted(INTACT)), st.integers(0, 400), st.binary(max_size=3)), max_size=4)


@given(damages, st.sampled_from([None, INDEX, ONE, RANKS[0]]))
def test_no_damage_raises(damage: list[tuple[str, int, bytes]], entry: str | None) -> None:
    contents = dict(INTACT)
    for name, position, replacement in damage:
        old = contents[name]
        contents[name] = old[:position] + replacement + old[position + 1 :]
    index, problems = read(contents, entry)
    if refusal(problems, "here", strict=True) is None:
        stored(index, contents)
