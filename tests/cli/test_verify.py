"""`verify`: a line for each fault."""

FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_valid_checkpoints(cli, single, directory):
    assert cli("verify", single) == (0, f"{single}: OK, 5 tensors in 1 file\n", "")
    assert cli("verify", directory) == (0, f"{directory}: OK, 5 tensors in 2 files\n", "")


def test_every_fault_has_a_line(cli, directory):
    for file, damage in zip(FILES, (lambda content: content[:-1], lambda content: content + b"\0"), strict=True):
        (directory / file).write_bytes(damage((directory / file).read_bytes()))
    result = cli("verify", directory)
    assert (result.status, result.err) == (1, "")
    lines = result.out.splitlines()
    assert len(lines) == 2
    for file, line in zip(FILES, lines, strict=True):
        assert line.startswith(f"{directory / file}: expected")


def test_a_missing_file_and_a_wrong_header(cli, directory):
    (directory / FILES[0]).unlink()
    (directory / FILES[1]).write_bytes(b"\xff" * 64)
    result = cli("verify", directory)
    assert result.status == 1
    assert [line.split(": ")[0] for line in result.out.splitlines()] == [str(directory / file) for file in FILES]


def test_what_is_not_there_is_an_error(cli, tmp_path):
    for missing in (tmp_path / "none", tmp_path / "none.safetensors"):
        result = cli("verify", missing)
        assert (result.status, result.out) == (1, "")
        assert result.err == f"error: {missing}: cannot be listed: No such file or directory\n"


def test_an_index_alone(cli, directory):
    for file in FILES:
        (directory / file).unlink()
    result = cli("verify", directory)
    assert (result.status, result.err) == (1, "")
    assert result.out.splitlines() == [f"{directory / file}: is named by the index and missing" for file in FILES]
