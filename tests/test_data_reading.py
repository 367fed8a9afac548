"""Records of files: what is read, in which order, and what is said when it cannot be."""

import gzip
import json
import sys
import types
from pathlib import Path

import pytest

from l2l.train.data import DataError, read_records


def write(path: Path, text: str | bytes) -> Path:
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def texts(*sources: str | Path, **settings: str) -> list[str]:
    return [record.values["text"] for record in read_records(list(sources), **settings)]


def objects(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def refusal(source: str | Path) -> str:
    with pytest.raises(DataError) as raised:
        list(read_records(source))
    return str(raised.value)


TEXT = "\n\nfirst line\nsecond line\n \n\t\nthird\r\n\n"


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "A.TXT"])
def test_blank_lines_part_the_documents_of_a_text(tmp_path, name) -> None:
    records = list(read_records(write(tmp_path / name, TEXT)))
    assert [record.values for record in records] == [
        {"text": "first line\nsecond line"},
        {"text": "third"},
    ]
    assert [record.place for record in records] == [
        f"{tmp_path / name}, line 3",
        f"{tmp_path / name}, line 7",
    ]


def test_a_text_can_be_one_document_or_one_a_line(tmp_path) -> None:
    path = write(tmp_path / "a.txt", TEXT)
    assert texts(path, documents="line") == ["first line", "second line", "third"]
    assert texts(path, documents="file") == ["first line\nsecond line\n \n\t\nthird\n"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_every_line_of_jsonl_is_a_record(tmp_path, name) -> None:
    path = write(tmp_path / name, '{"text": "caf\u00e9", "n": 1}\n\n{"n": 2}')
    records = list(read_records(path))
    assert [record.values for record in records] == [{"text": "caf\u00e9", "n": 1}, {"n": 2}]
    assert records[1].place == f"{path}, line 3"


def test_a_byte_order_mark_is_not_text(tmp_path) -> None:
    assert texts(write(tmp_path / "a.txt", b"\xef\xbb\xbfword\n")) == ["word"]


def test_several_files_and_folders_are_read_in_order(tmp_path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "b.jsonl", objects("2"))
    write(folder / "a.txt.gz", "1")
    write(folder / "README.md", "not data")
    last = write(tmp_path / "c.txt", "3")
    assert texts(folder, last) == ["1", "2", "3"]
    assert texts(last, folder) == ["3", "1", "2"]
    assert [record.values["text"] for record in read_records(str(last))] == ["3"]


def test_reading_streams(tmp_path) -> None:
    path = write(tmp_path / "a.jsonl", objects("fine") + "not JSON\n")
    records = read_records(path)
    assert next(records).values == {"text": "fine"}
    with pytest.raises(DataError, match="line 2"):
        next(records)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"text": 1}\n{"text": }\n', ", line 2: is not JSON: Expecting value at"),
        ("a.jsonl", '{"text": 1}\n\n{"text": "cut', ", line 3: is not JSON: Unterminated string"),
        ("a.jsonl", "[" * 100_000, ", line 1: is not JSON: maximum recursion depth"),
        ("a.jsonl", "[1, 2]\n", ", line 1: found '[1, 2]'. Expected one whole object"),
        ("a.jsonl.gz", "3\n", ", line 1: found '3'. Expected one whole object"),
        ("a.jsonl", "\n \n", ": is empty, or has blank lines only."),
        ("a.txt", "\n \n", ": is empty, or has blank lines only."),
        ("a.txt", "", ": is empty, or has blank lines only."),
        ("a.txt.gz", "", ": is empty, or has blank lines only."),
        ("a.txt", b"fine\ncaf\xe9\n", ", line 2: is not UTF-8: found byte 0xe9 at position 4"),
        ("a.jsonl.gz", b'{"a": "\xff"}', ", line 1: is not UTF-8: found byte 0xff at position 8"),
        ("a.md", "text", ": unsupported file type. Expected a file name ending in .txt"),
    ],
)
def test_errors_name_the_file_and_the_line(tmp_path, name, content, said) -> None:
    path = write(tmp_path / name, content)
    assert refusal(path).startswith(f"{path}{said}")


def test_what_is_not_compressed_or_cut_off_is_named(tmp_path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(b"plain")
    assert refusal(path).startswith(f"{path}, after line 0: cannot be read: ")
    whole = gzip.compress("".join(f"line {n}\n\n" for n in range(5000)).encode())
    path.write_bytes(whole[: len(whole) // 2])
    assert refusal(path).startswith(f"{path}, after line ")
    path.write_bytes(whole[:100] + bytes(100) + whole[200:])
    assert refusal(path).startswith(f"{path}, after line ")


def test_what_is_missing_is_said_before_anything_is_read(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    there = write(tmp_path / "train.jsonl", objects("1"))
    missing = tmp_path / "trian.jsonl"
    with pytest.raises(DataError, match=r"trian.jsonl is not there\. Did you mean train.jsonl\?"):
        read_records([there, missing])
    with pytest.raises(DataError, match=r"^trian.jsonl is not there\. Did you mean train.jsonl"):
        read_records("trian.jsonl")
    with pytest.raises(DataError, match=r"^\./nothing is not there\.$"):
        read_records("./nothing")
    with pytest.raises(DataError, match="no data were named"):
        read_records([])


def test_a_folder_without_data_says_what_is_in_it(tmp_path) -> None:
    assert "has no data files; found nothing." in refusal(tmp_path)
    write(tmp_path / "README.md", "not data")
    assert "has no data files; found README.md. Expected a file name ending in .txt" in refusal(
        tmp_path
    )


# --------------------------------------------------------------------------------------------------
# Tables and lists


CSV = 'text, label\r\n"one, ""two""\nthree",1\r\n\r\nfour,\r\n'


@pytest.mark.parametrize("compressed", [False, True])
def test_rows_of_csv_have_their_names_and_lines(compressed: bool, tmp_path: Path) -> None:
    path = tmp_path / ("a.csv.gz" if compressed else "a.csv")
    data = b"\xef\xbb\xbf" + CSV.encode()
    path.write_bytes(gzip.compress(data) if compressed else data)
    first, second = read_records(path)
    assert first.values == {"text": 'one, "two"\nthree', "label": "1"}
    assert first.place == f"{path}, line 3"
    assert second.values == {"text": "four", "label": None}
    assert second.place == f"{path}, line 5"


def test_values_may_be_parted_by_tabs_and_be_long(tmp_path: Path) -> None:
    long = "word, " * 50_000
    write(tmp_path / "a.tsv", f"text\tlabel\n{long}\tb\n")
    (record,) = read_records(tmp_path / "a.tsv")
    assert record.values == {"text": long, "label": "b"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1\n", "line 2: found 1 values, expected 2: 'a', 'b'"),
        ("a,b\n1,2,3\n", "line 2: found 3 values"),
        ("a,a\n1,2\n", "line 1: columns have the same name"),
        ('a,b\n"1,2\n', "line 2: unexpected end of data"),
        ("a,b\n", "is empty"),
    ],
)
def test_what_is_no_csv_is_named_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    write(tmp_path / "a.csv", text)
    assert said in refusal(tmp_path / "a.csv")


@pytest.mark.parametrize(
    "text",
    [
        '[{"text": "1"},\n {"text": "2"}]',
        '{"version": 1, "data": [{"text": "1"}, {"text": "2"}], "ids": [3]}',
        '{"text": "1"}\n{"text": "2"}\n',
    ],
)
def test_lists_of_objects_are_read(text: str, tmp_path: Path) -> None:
    write(tmp_path / "a.json", text)
    records = list(read_records(tmp_path / "a.json"))
    assert [record.values for record in records] == [{"text": "1"}, {"text": "2"}]
    assert "a.json" in records[1].place


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"text": "1"},', "is not JSON at line 1"),
        ("[1, 2]", "found [1, 2]. Expected a list of objects"),
        ("[]", "is empty"),
        ('[{"text": "\\ud800"}]', "unpaired surrogate, \\ud800"),
        ("7", "found 7. Expected a list of objects"),
    ],
)
def test_what_is_no_list_of_objects_is_refused(text: str, said: str, tmp_path: Path) -> None:
    write(tmp_path / "a.json", text)
    assert said in refusal(tmp_path / "a.json")


def test_a_parquet_file_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"text": "1"}, {"text": "2"}]).to_parquet(tmp_path / "a.parquet")
    records = list(read_records(tmp_path / "a.parquet"))
    assert [record.values for record in records] == [{"text": "1"}, {"text": "2"}]


# --------------------------------------------------------------------------------------------------
# The rest is left to the datasets library.


@pytest.mark.parametrize(
    ("source", "what"), [("a.parquet", ".parquet file"), ("owner/name", "no file or folder here")]
)
def test_without_the_datasets_library_the_error_says_how_to_get_it(
    tmp_path, monkeypatch, source, what
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.parquet", "")
    with pytest.raises(
        DataError, match=rf"{what}.*pip install datasets.*also with \.gz, need nothing"
    ):
        read_records(source)


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("a.parquet", ("parquet", {"data_files": "a.parquet"})),
        ("a.arrow", ("arrow", {"data_files": "a.arrow"})),
        ("owner/name", ("owner/name", None, {})),
        ("name@part:test[:5]", ("name", "part", {"split": "test[:5]"})),
    ],
)
def test_other_files_and_names_go_to_the_datasets_library(
    tmp_path, monkeypatch, source, call
) -> None:
    calls = []

    def load_dataset(*names, **settings):
        calls.append((*names, settings))
        return iter([{"text": "1"}, {"text": "2"}])

    library = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.chdir(tmp_path)
    for name in ("a.parquet", "a.arrow"):
        write(tmp_path / name, "")
    records = list(read_records(source))
    *names, settings = call
    assert calls == [(*names, {"split": "train", "streaming": True, **settings})]
    assert [record.values for record in records] == [{"text": "1"}, {"text": "2"}]
    assert records[1].place == f"{source}, row 2"


def test_what_the_datasets_library_says_is_passed_on(monkeypatch) -> None:
    def load_dataset(*_, **__):
        yield {"text": "1"}
        raise KeyError("no such thing")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert refusal("owner/name") == (
        "owner/name, after row 1: the datasets library cannot read it: KeyError: 'no such thing'"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (r'{"text": "a \ud800 b"}', r"contains an unpaired surrogate, \\ud800"),
        (r'{"messages": [{"role": "user", "content": "\uDFFF"}]}', "contains an unpaired"),
        ('{"text": "a", "label": ' + "7" * 5000 + "}", "is not JSON: Exceeds the limit"),
    ],
    ids=["half", "half within", "endless number"],
)
def test_what_is_json_but_no_text_or_number_is_refused_with_its_line(
    line: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00 whole"}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"data.jsonl, line 2: {said}"):
        list(read_records(path))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_utf_16_is_named_with_what_to_do(encoding: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes('{"text": "some words"}\n'.encode(encoding))
    said = refusal(tmp_path / name)
    assert "is UTF-16, expected UTF-8" in said
    assert f"iconv -f utf-16 -t utf-8 '{name}' > 'utf8-{name}'" in said
