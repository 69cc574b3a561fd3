"""Every kind of damage a checkpoint's headers can have is refused by name, and all of it at once."""

import os
from pathlib import Path

import pytest

from rocline.engine.config import ModelConfig
from rocline.engine.layout import expected_tensors
from rocline.engine.shards import CheckpointError, read_table

A, B = "a.safetensors", "b.safetensors"
WEIGHT = "layers.1.attn.wq_a.weight"  # E4M3 [64, 128]
NORM = "norm.weight"  # BF16 [128]


def table(folder: Path):
    return read_table(folder, expected_tensors(ModelConfig.load(folder)))


def faults(folder: Path) -> dict[str, list[str]]:
    with pytest.raises(CheckpointError) as caught:
        table(folder)
    return caught.value.problems


def first_names(files, file, n):
    return list(files.shards[file])[:n]


def set_claim(files, name, **fields):
    def edit(header):
        header[name].update(fields)

    files.header_edits[files.index[name]] = edit


def test_whole_checkpoint_is_taken(micro_shards):
    stored = table(micro_shards.write())
    assert list(stored) == list(expected_tensors(ModelConfig.load(micro_shards.folder)))
    for name, file in micro_shards.index.items():
        whole = (micro_shards.folder / file).read_bytes()
        at, n_bytes = stored[name].offset, stored[name].spec.n_bytes
        assert whole[at : at + n_bytes] == micro_shards.shards[file][name].data


def missing_tensor(files):
    files.drop(WEIGHT)
    return {"missing tensors": [f"{WEIGHT}: F8_E4M3 [64, 128]"]}


def unknown_tensor(files):
    files.shards[A]["layers.5.attn_norm.weight"] = files.shards[files.index[NORM]][NORM]
    files.index["layers.5.attn_norm.weight"] = A
    return {"unknown tensors": [f"layers.5.attn_norm.weight: BF16 [128] in {A}"]}


def duplicate_tensor(files):
    other = A if files.index[NORM] == B else B
    files.shards[other][NORM] = files.shards[files.index[NORM]][NORM]
    return {"duplicate tensors": [f"{NORM}: in {A} and in {B}"]} | (
        {"index": [f"{NORM}: listed in {B}, stored in {A}"]} if other == A else {}
    )


def wrong_shape(files):
    set_claim(files, WEIGHT, shape=[128, 64])
    return {"wrong shapes": [f"{WEIGHT}: [128, 64], want [64, 128]"]}


def wrong_dtype(files):
    set_claim(files, WEIGHT, dtype="I8")
    return {"wrong dtypes": [f"{WEIGHT}: I8, want F8_E4M3"]}


def dtype_of_another_format(files):  # case B46
    set_claim(files, WEIGHT, dtype="F4")
    return {"wrong dtypes": [f"{WEIGHT}: F4, want F8_E4M3"]}


def scales_as_bytes(files):  # case B29: a U8 scale might be a linear one
    set_claim(files, "layers.1.attn.wq_a.scale", dtype="U8")
    return {"wrong dtypes": ["layers.1.attn.wq_a.scale: U8, want F8_E8M0"]}


def odd_packed_shape(files):  # case B46
    name = "layers.0.ffn.experts.0.w1.weight"
    set_claim(files, name, shape=[63, 64])
    return {
        "malformed entries": [f"{name} in {files.index[name]}: 4,096 bytes, 4,032 for I8 [63, 64]"],
        "wrong shapes": [f"{name}: [63, 64], want [64, 64]"],
    }


def overlapping_tensors(files):
    first, second = first_names(files, A, 2)
    n_first, n_second = (len(files.shards[A][name].data) for name in (first, second))
    set_claim(files, second, data_offsets=[n_first - 2, n_first + n_second - 2])
    third = first_names(files, A, 3)[2]
    return {
        "overlapping tensors": [f"{second} begins inside {first} in {A}"],
        "unclaimed bytes": [f"2 bytes between {second} and {third} in {A}"],
    }


def tensor_inside_another(files):
    first, second = first_names(files, A, 2)
    n_first, n_second = (len(files.shards[A][name].data) for name in (first, second))
    assert files.shards[A][first].dtype == "F32"

    def edit(header):
        header[first] |= {"data_offsets": [0, n_first + n_second], "shape": [(n_first + n_second) // 4]}
        header[second]["data_offsets"] = [4, 4 + n_second]

    files.header_edits[A] = edit
    return {"overlapping tensors": [f"{second} begins inside {first} in {A}"], "wrong shapes": [f"{first}: "]}


def offsets_past_the_end(files):
    name = list(files.shards[A])[-1]
    begin = sum(len(tensor.data) for tensor in files.shards[A].values()) - len(files.shards[A][name].data)
    n_bytes = len(files.shards[A][name].data)
    set_claim(files, name, data_offsets=[begin + 10**15, begin + 10**15 + n_bytes])
    before = list(files.shards[A])[-2]
    return {
        "unclaimed bytes": [f"1,000,000,000,000,000 bytes between {before} and {name} in {A}"],
        "short shards": [name],
    }


def negative_offsets(files):
    set_claim(files, WEIGHT, data_offsets=[-8192, 0])
    return {"malformed entries": [f"{WEIGHT!r} in {files.index[WEIGHT]}: Expected `int` >= 0"]}


def backward_offsets(files):
    set_claim(files, WEIGHT, data_offsets=[8192, 0])
    return {"malformed entries": [f"{WEIGHT!r} in {files.index[WEIGHT]}: data_offsets [8192, 0]"]}


def endless_shape(files):
    set_claim(files, WEIGHT, shape=[2**62] * 1000)
    return {"malformed entries": ["Expected `array` of length <= 8"]}


def name_that_moves_the_cursor(files):
    files.shards[A]["\x1b[2Jnorm"] = files.shards[files.index[NORM]][NORM]
    return {"malformed entries": ["'\\x1b[2Jnorm' in a.safetensors: data_offsets"], "unclaimed bytes": [A]}


def trailing_bytes(files):
    files.byte_edits[A] = lambda whole: whole + b"\0" * 64
    return {"unclaimed bytes": [f"64 bytes after {list(files.shards[A])[-1]} in {A}"]}


def truncated_shard(files):
    files.byte_edits[A] = lambda whole: whole[:-100]
    return {"short shards": [f"{A}: "]}


def moved_in_the_index(files):
    files.index[NORM] = other = A if files.index[NORM] == B else B
    return {"index": [f"{NORM}: listed in {other}, stored in {A if other == B else B}"]}


def listed_only(files):
    files.index["layers.9.norm"] = A
    return {"index": [f"layers.9.norm: listed in {A}, which does not hold it"]}


def stored_only(files):
    file = files.index.pop(NORM)
    return {"index": [f"{NORM}: stored in {file}, not listed"]}


def index_out_of_the_folder(files):
    files.index[NORM] = f"../{files.folder.name}/{A}"
    return {"index": ["is not the name of a .safetensors file of this folder", f"{NORM}: stored in"]}


DAMAGES = [
    missing_tensor,
    unknown_tensor,
    duplicate_tensor,
    wrong_shape,
    wrong_dtype,
    dtype_of_another_format,
    scales_as_bytes,
    odd_packed_shape,
    overlapping_tensors,
    tensor_inside_another,
    offsets_past_the_end,
    trailing_bytes,
    truncated_shard,
    moved_in_the_index,
    listed_only,
    stored_only,
    index_out_of_the_folder,
]
# Entries that are dropped leave their tensor missing and their bytes unclaimed as well.
MALFORMED = [
    negative_offsets,
    backward_offsets,
    endless_shape,
    name_that_moves_the_cursor,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_nothing_else(micro_shards, damage):
    want = damage(micro_shards)
    problems = faults(micro_shards.write())
    assert problems.keys() == want.keys()
    for kind, texts in want.items():
        assert len(problems[kind]) == len(texts)
        for text in texts:
            assert any(text in problem for problem in problems[kind]), problems[kind]


@pytest.mark.parametrize("damage", MALFORMED)
def test_malformed_entry_is_named(micro_shards, damage):
    for kind, (text,) in damage(micro_shards).items():
        assert text in "\n".join(faults(micro_shards.write())[kind])


BAD_BYTES = {
    "empty file": (lambda whole: b"", "0 bytes, too few for a header"),
    "cut in the header": (lambda whole: whole[:1000], "the file has 1,000"),
    "header of 2^63 bytes": (
        lambda whole: b"\0" * 7 + b"\x80" + whole[8:],
        "header of 9,223,372,036,854,775,808",
    ),
    "no JSON": (lambda whole: whole[:8] + b"!" + whole[9:], "not JSON"),
    "not UTF-8": (lambda whole: whole.replace(b"layers", b"\xff\xfe\xfdabc", 1), "not JSON"),
    "an array": (lambda whole: b"\x02" + b"\0" * 7 + b"[]" + whole[10:], "list in place of an object"),
    "nested without end": (lambda whole: whole[:8] + b"[" * (len(whole) - 8), "not JSON"),
    "a name twice": (lambda whole: whole.replace(b"layers.1", b"layers.0"), "is there twice"),
}


@pytest.mark.parametrize("case", BAD_BYTES)
def test_unreadable_shard_is_one_problem(micro_shards, case):
    micro_shards.byte_edits[A], says = BAD_BYTES[case]
    problems = faults(micro_shards.write())
    assert problems.keys() == {"unreadable shards"}
    (text,) = problems["unreadable shards"]
    assert text.startswith(f"{A}: ")
    assert says in text


def test_absent_shard_is_one_problem(micro_shards):
    (micro_shards.write() / B).unlink()
    assert faults(micro_shards.folder) == {"unreadable shards": [f"{B}: No such file or directory"]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{", "not JSON"),
        (b"[1]", "list in place of an object"),
        (b"{}", "weight_map is no filled object"),
        (b'{"weight_map": {}}', "weight_map is no filled object"),
        (b'{"weight_map": {"x": "a", "x": "b"}}', "'x' is there twice"),
    ],
)
def test_broken_index(micro_shards, text, says):
    (micro_shards.write() / "model.safetensors.index.json").write_bytes(text)
    assert says in faults(micro_shards.folder)["unreadable index"][0]


def test_no_weights(micro_shards):
    assert "neither" in faults(micro_shards.folder)["no weights"][0]


def test_all_faults_in_one_error(micro_shards):
    """Faults of different kinds and files come together; the message is short, the list complete."""
    experts = [name for name in micro_shards.index if ".experts.3." in name]
    for name in experts:
        micro_shards.drop(name)
    set_claim(micro_shards, NORM, dtype="F16")
    other = B if micro_shards.index[NORM] == A else A
    micro_shards.byte_edits[other] = lambda whole: whole[:-1]
    with pytest.raises(CheckpointError) as caught:
        table(micro_shards.write())
    problems, message = caught.value.problems, str(caught.value)
    assert problems.keys() == {"missing tensors", "wrong dtypes", "short shards"}
    assert [text.split(":")[0] for text in problems["missing tensors"]] == sorted(
        experts, key=list(expected_tensors(ModelConfig.load(micro_shards.folder))).index
    )
    assert f"missing tensors ({len(experts)}):" in message
    assert f"... and {len(experts) - 8} more" in message
    assert message.count("\n") < 20


def test_damaged_headers_never_crash(micro_model, tmp_path, rng):
    """Random bytes in the header: either the same table, or CheckpointError."""
    whole = (micro_model / "model.safetensors").read_bytes()
    n_header = int.from_bytes(whole[:8], "little")
    path = tmp_path / "model.safetensors"
    expected = expected_tensors(ModelConfig.load(micro_model))
    path.write_bytes(whole)
    good = read_table(tmp_path, expected)
    n_refused = 0
    for _ in range(100):
        with path.open("r+b") as file:
            for at in rng.integers(0, 8 + n_header, size=rng.integers(1, 4)).tolist():
                file.seek(at)
                file.write(rng.choice(list(b'\0 "0159{}[],:-.eEaF\x7f\xff')).astype("uint8").tobytes())
        try:
            assert read_table(tmp_path, expected) == good
        except CheckpointError:
            n_refused += 1
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), whole[: 8 + n_header], 0)
    assert n_refused > 50
