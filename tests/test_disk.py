"""What counts as a full disk, however a library says it, and what is said of it."""

import errno
import subprocess
import sys

import pytest

from generative_recommenders import disk, terminal


def chained():
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError as error:
        raise RuntimeError("write failed") from error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded", "/home/x"),
        OSError(errno.EFBIG, "File too large"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
        RuntimeError(
            "[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file data/0: file"
        ),
        OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device"),
        ValueError("IO Error: Could not write file: No space left on device"),
        disk.DiskFull("no room"),
    ],
    ids=lambda error: str(error)[:30],
)
def test_a_full_disk_is_known_by_number_or_by_text(error):
    assert disk.is_full(error)


def test_a_full_disk_is_known_behind_another_error():
    with pytest.raises(RuntimeError) as caught:
        chained()
    assert disk.is_full(caught.value)


@pytest.mark.parametrize(
    "error", [None, OSError(errno.EACCES, "Permission denied"), RuntimeError("pos 3"), KeyError(28)]
)
def test_other_errors_are_none(error):
    assert not disk.is_full(error)


def test_an_error_that_is_its_own_cause_ends():
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__context__, second.__context__ = second, first
    assert not disk.is_full(first)


def test_what_is_said_has_the_folder_and_the_bytes_where_they_are_known(tmp_path):
    assert disk.where(None) == ""
    text = disk.where(tmp_path / "not" / "yet", needed=10**18)
    assert text.startswith(f" of {tmp_path}/not/yet (") and "GB left, 1000000000.000 GB needed)" in text
    assert "quota or a limit on file sizes" not in text
    assert "a quota or a limit on file sizes, as of ulimit -f" in disk.where(tmp_path, needed=1)


def test_a_command_says_it_too(capsys):
    def main():
        raise OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device")

    assert terminal.guarded(main) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: no space left on the disk (") and said.count("\n") == 1


def test_generated_data_on_a_full_disk(tmp_path):
    """A limit on the size of files stands for the disk: it needs no rights."""
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); from "
    limited += "generative_recommenders.data.synthetic.__main__ import main; sys.exit(main(['--path', sys.argv[1]]))"
    done = subprocess.run([sys.executable, "-c", limited, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("error: no space left on the disk"), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    disk.write_atomically(path, "é old\n")
    assert path.read_bytes() == "é old\n".encode()

    def full(_):
        assert path.read_text(encoding="utf-8") == "é old\n"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        disk.write_atomically(path, "new\n" * 1000)
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]
    assert path.read_text(encoding="utf-8") == "é old\n"
