"""Yambda's command line, its download against a stand-in for the hub's client, and its data set."""

import hashlib
import random
import sys
import types

import pytest

from generative_recommenders.data.yambda import CONTEXTUAL_FEATURES, yambda
from generative_recommenders.data.yambda.__main__ import main
from generative_recommenders.data.yambda.download import download, hub_files
from generative_recommenders.errors import UserError
from tests.data.prepare_oracle import random_rows, write_yambda


@pytest.fixture
def files(tmp_path):
    rows, artists, albums = random_rows(random.Random(8), 5, crowded=False)
    for row in rows:
        row["timestamp"] = row["timestamp"] % 20_000 * 20  # 4.6 days
    write_yambda(tmp_path / "yambda", rows, artists, albums)
    return tmp_path / "yambda"


def test_prepare_verify_info_and_batches(files, capsys):
    where = ["--size", "50m", "--path", str(files)]
    assert main(["prepare", *where, "--min-history", "5", "--memory", "1GiB", "--threads", "1"]) == 0
    assert main(["verify", *where]) == 0 and main(["info", *where]) == 0
    out = capsys.readouterr().out
    assert "every checksum" in out and "event_undislike" in out and "bytes per event" in out
    data = yambda(str(files), min_history=5, history_length=30, table_rows_limit=100)
    assert data.schema.contextual_features == CONTEXTUAL_FEATURES
    assert data.schema.table_rows["user_x_artist"] == 100 and any("hashed down to 100" in note for note in data.notes)
    assert data.schema.table_rows["item_id"] == data.cache.vocab["item_id"]
    batch = next(data.batches(data.windows, 4))
    assert batch.batch_size == 4
    with pytest.raises(UserError, match="min_history=5"):
        yambda(str(files))
    with pytest.raises(UserError, match="no size '5m'"):
        yambda(str(files), size="5m")
    with pytest.raises(UserError, match="yambda prepare --size 500m"):
        yambda(str(files), size="500m")


def test_errors_are_one_line_and_status_two(tmp_path, capsys):
    assert main(["prepare", "--size", "50m", "--path", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: Yambda: ") and error.count("\n") == 1
    assert main(["info", "--size", "50m", "--path", str(tmp_path)]) == 2


class Hub(types.ModuleType):
    """A stand-in for the hub's client: files in memory, optionally broken in one way."""

    def __init__(self, content, broken=None):
        super().__init__("huggingface_hub")
        self.content, self.broken, self.fetched = content, broken, []

    def HfApi(self):
        return self

    def get_paths_info(self, repository, names, repo_type):
        if self.broken == "offline":
            raise ConnectionError("no route\nto host")
        sums = {name: hashlib.sha256(data).hexdigest() for name, data in self.content.items()}
        return [
            types.SimpleNamespace(path=n, size=len(self.content[n]), lfs=types.SimpleNamespace(sha256=sums[n]))
            for n in names
            if n in self.content
        ]

    def hf_hub_download(self, repository, name, repo_type, local_dir):
        assert (repository, repo_type) == ("yandex/yambda", "dataset")
        self.fetched.append(name)
        if self.broken == "cut" and len(self.fetched) == 2:
            raise OSError("connection reset")
        data = self.content[name]
        target = __import__("pathlib").Path(local_dir) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data[:-1] + b"?" if self.broken == "flipped" else data)


@pytest.fixture
def hub(monkeypatch):
    hub = Hub({name: name.encode() * 50 for name in hub_files("500m")})
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return hub


def test_download_fetches_once_and_goes_on(hub, tmp_path):
    hub.broken = "cut"
    with pytest.raises(UserError, match="connection reset.*it continues"):
        download(tmp_path, "500m", say=lambda text: None)
    hub.broken, hub.fetched = None, []
    download(tmp_path, "500m", say=lambda text: None)
    assert hub.fetched == hub_files("500m")[1:]
    for name, data in hub.content.items():
        assert (tmp_path / name).read_bytes() == data
    hub.fetched = []
    (tmp_path / hub_files("500m")[0]).write_bytes(b"x" * len(hub.content[hub_files("500m")[0]]))
    download(tmp_path, "500m", say=lambda text: None)
    assert hub.fetched == hub_files("500m")[:1]


def test_download_refuses_wrong_bytes_and_missing_files(hub, tmp_path):
    hub.broken = "flipped"
    with pytest.raises(UserError, match="did not arrive intact"):
        download(tmp_path, "500m", say=lambda text: None)
    assert not any(file.is_file() for file in tmp_path.rglob("*"))
    hub.broken = None
    del hub.content["album_item_mapping.parquet"]
    with pytest.raises(UserError, match="album_item_mapping"):
        download(tmp_path, "500m", say=lambda text: None)


def test_download_without_network_or_client(hub, tmp_path, monkeypatch, capsys):
    hub.broken = "offline"
    assert main(["download", "--size", "500m", "--path", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no route to host" in error and "flat/500m/multi_event.parquet" in error
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["download", "--size", "500m", "--path", str(tmp_path)]) == 2
    assert "pip install huggingface_hub" in capsys.readouterr().err


def test_download_needs_room(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=10))
    with pytest.raises(UserError, match="GB are free"):
        download(tmp_path, "500m", say=lambda text: None)
