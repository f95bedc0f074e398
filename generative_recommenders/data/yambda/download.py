"""Fetching Yambda's files from the Hugging Face hub: resumable, checked against the hub's checksums."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable

from generative_recommenders.data.prepare.columns import sha256
from generative_recommenders.data.yambda.layout import MAPPINGS, require_size
from generative_recommenders.errors import UserError
from generative_recommenders.paths import user_path

REPOSITORY = "yandex/yambda"


def hub_files(size: str) -> list[str]:
    """Names of a size's files within the data set, and here below the target folder."""
    return [f"flat/{require_size(size)}/multi_event.parquet", *MAPPINGS.values()]


def download(path: str | pathlib.Path, size: str, say: Callable[[str], None] = print) -> None:
    """Fetch the files of a size into the folder ``path``; files that are there and right are left alone.

    The hub's client resumes a partial transfer and gives a file its name when it is complete; then its sha256 must be
    the hub's. Raises ``UserError`` without the client, without network, for a full disk and for a wrong checksum.
    """
    folder, hub, names = user_path(path), _client(), hub_files(size)
    try:
        infos = {info.path: info for info in hub.HfApi().get_paths_info(REPOSITORY, names, repo_type="dataset")}
    except Exception as error:
        raise _unreachable(folder, names, error) from None
    missing = [name for name in names if name not in infos]
    if missing:
        raise UserError(f"{REPOSITORY} on the hub has no file {missing[0]}: its layout has changed")
    wanted = [name for name in names if not _is_right(folder / name, infos[name])]
    folder.mkdir(parents=True, exist_ok=True)
    need, free = sum(infos[name].size for name in wanted), shutil.disk_usage(folder).free
    if need > free:
        raise UserError(f"downloading into {folder} needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    for name in names:
        if name not in wanted:
            say(f"{folder / name}: already there, checksum right")
            continue
        say(f"{folder / name}: fetching {infos[name].size / 1e9:.2f} GB")
        try:
            hub.hf_hub_download(REPOSITORY, name, repo_type="dataset", local_dir=str(folder))
        except Exception as error:
            raise _unreachable(folder, [name], error) from None
        if not _is_right(folder / name, infos[name]):
            (folder / name).unlink(missing_ok=True)
            raise UserError(f"{folder / name} did not arrive intact (size or sha256 differs from the hub's): run again")


def _client():
    try:
        import huggingface_hub
    except ImportError:
        raise UserError("downloading needs the hub's client: pip install huggingface_hub") from None
    return huggingface_hub


def _is_right(file: pathlib.Path, info) -> bool:
    """Whether a file has the size and checksum the hub states (small files without a stated checksum: the size)."""
    if not file.is_file() or file.stat().st_size != info.size:
        return False
    return info.lfs is None or sha256(file) == info.lfs.sha256


def _unreachable(folder: pathlib.Path, names: list[str], error: Exception) -> UserError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return UserError(
        f"cannot fetch {REPOSITORY} from the hub ({reason}): check the network and run again, it continues; "
        f"or put {', '.join(names)} under {folder} by hand"
    )
