"""The dry run from the command line."""

import json
import pathlib
import re
import shlex

import pytest

from benchmarks.train_step import CONTEXT_TABLES, ITEM_TABLES
from generative_recommenders.train import gin_files, step_cost, what_fits
from generative_recommenders.train.__main__ import main

REPO = pathlib.Path(__file__).resolve().parents[2]
FIVE_B = str(REPO / "configs" / "yambda_5b.gin")


@pytest.fixture
def dry(capfd):
    """Runs ``--dry-run`` on the public benchmark: exit status, stdout, stderr."""

    def run(*arguments, config=FIVE_B):
        status = main(["--config", config, "--dry-run", *arguments])
        out, err = capfd.readouterr()
        return status, out, err

    return run


def test_the_whole_picture(dry):
    status, out, _ = dry("--ranks", "8", "--device-memory", "139GiB", "--device-kind", "h200")
    assert status == 0
    for part in (
        "yambda.history_length = 4086  # gin",
        "Machine: 8 x NVIDIA H200 with 139.0 GiB, 1 host, no host memory",
        "4.76 G events of 1,000,000 users",
        "2,663 in the mean",
        "4,095 at most",
        "of which 8.0 GiB are headroom",
        "Last layer: the candidates alone, targets only, absorbed",
        "TFLOP a rank",
        "link of NVIDIA H200 (450 GB/s)",
        "400 Gbit/s a rank (50 GB/s)",
        "2,290,835,423 samples in 300 windows",
        "279,643 steps",
        "STU layer, attention and LMSD: TRITON, fused",
        "attention kernels: warp-specialised",
    ):
        assert part in out, part
    lines = [line.split() for line in out.splitlines() if line.startswith("  ")]
    for name in (*ITEM_TABLES, *CONTEXT_TABLES):
        assert [name] == [line[0] for line in lines if line[0] == name], name


def test_parts_of_memory_add_up(dry):
    _, out, _ = dry()
    block = out.split("Memory per rank")[1].split("recomputed:")[0]
    sizes = [float(size.replace(",", "")) for size in re.findall(r"([\d.,]+) GiB(?=\n|, of)", block)]
    assert sum(sizes) == pytest.approx(139.0, abs=0.05)


def test_flops_by_hand(dry):
    """Two full layers and the targets-only one, which is 2e-4 of them: 6 T D cols + 2 S²/2 H 7 d + 6 T 3 H d D."""
    _, out, _ = dry()
    rows, samples = 2663, 1024
    layer = 6 * rows * samples * 512 * 2048 + rows**2 * samples * 4 * 7 * 128 + 6 * rows * samples * 1536 * 512
    said = float(re.search(r"([\d.]+) TFLOP a rank", out).group(1))
    assert said == pytest.approx(2 * layer / 1e12, rel=5e-3)


def test_the_share_of_the_peak_is_the_recorded_one():
    record = next(
        r for r in json.loads((REPO / "benchmarks/results/train_step.json").read_text())
        if r["shape"].endswith("targets_only norecompute")
    )  # fmt: skip
    rows, samples = 2663, 1024
    layer = 6 * rows * samples * 512 * 2048 + rows**2 * samples * 4 * 7 * 128 + 6 * rows * samples * 1536 * 512
    assert 2 * layer / (record["ms"] / 1e3) / 989.4e12 == pytest.approx(step_cost.STEP_SHARE, abs=0.01)


def test_refused_with_the_reason_and_the_fix(dry):
    status, out, err = dry("--ranks", "1", "--device-memory", "80GiB")
    assert status == 2 and err == ""
    assert "does not fit: tables and their optimizer take 560.0 GiB" in out
    assert "the smallest change that would fit: --" in out


def suggestions(out):
    return re.findall(r"(?:would fit:|^  or) (--.*)$", out, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--ranks", "8", "--bind", "model.recompute_preprocessor=False"),
        ("--ranks", "1", "--device-memory", "80GiB"),
        ("--ranks", "4", "--device-memory", "96GiB", "--host-memory", "64GiB"),
    ],
    ids=["recompute", "small", "little host memory"],
)
def test_every_change_that_is_offered_fits(dry, arguments):
    status, out, _ = dry(*arguments)
    found = suggestions(out)
    assert status == 2 and found
    for words in found:
        assert dry(*arguments, *shlex.split(words))[0] == 0, words


def test_recomputation_alone_is_the_smallest_change(dry):
    _, out, _ = dry("--bind", "model.recompute_preprocessor=False")
    assert suggestions(out) == ["--bind model.recompute_preprocessor=True"]


def test_a_step_that_no_device_holds(dry):
    status, out, _ = dry("--device-memory", "40GiB")
    assert status == 2 and "no room for tables on a device of 40.0 GiB" in out
    assert any("train.batch_size=" in words for words in suggestions(out))


def test_another_kind_of_gpu(dry):
    status, out, _ = dry("--device-kind", "mi300x", "--ranks", "8")
    assert status == 0
    assert "8 x AMD Instinct MI300X with 191.0 GiB" in out
    assert "plain Triton: none are written for AMD Instinct MI300X" in out


def backends(out):
    """What the dry run says of each op and of the fused functions."""
    lines = out.split("Backends of the ops")[1].splitlines()[1:]
    return dict(line.strip().split(": ", 1) for line in lines)


def test_every_op_s_backend_is_told(dry):
    found = backends(dry()[1])
    assert {found[op] for op in ("encode", "attention", "lmsd", "candidate_attention")} == {
        "TRITON (the automatic choice)"
    }


def test_backends_that_are_asked_for(dry, monkeypatch):
    monkeypatch.setenv("HSTU_BACKEND", "PYTORCH")
    _, out, _ = dry()
    found = backends(out)
    for op in ("encode", "attention", "lmsd", "candidate_attention"):
        assert found[op].startswith("PYTORCH (environment variable HSTU_BACKEND); not TRITON: "), op
    assert "step by step: attention runs on PYTORCH" in out
    assert "warning: memory above is that of the fused kernels" in out


def test_an_op_s_own_variable_beats_a_gin_file_s_backend_as_in_a_run(dry, monkeypatch, tmp_path):
    monkeypatch.setenv("HSTU_ATTENTION_BACKEND", "PYTORCH")
    config = tmp_path / "with_backend.gin"
    config.write_text(f"include '{FIVE_B}'\nmodel.backend = 'TRITON'\n")
    found = backends(dry(config=str(config))[1])
    assert found["attention"].startswith("PYTORCH (environment variable HSTU_ATTENTION_BACKEND)")
    assert found["lmsd"] == "TRITON (option model.backend)"
    bound = backends(dry("--bind", "model.backend=TRITON")[1])
    assert bound["attention"] == "TRITON (the backend argument)"


def test_why_not_the_better_backend(dry):
    found = backends(dry("--bind", "model.hstu_attn_qk_dim=512", "--bind", "train.batch_size=128")[1])
    assert found["attention"] == (
        "PYTORCH (the automatic choice); not TRITON: d_qk=512, d_v=128: kernels go up to 256 per head"
    )


def test_a_backend_that_needs_a_gpu_to_be_asked_is_refused_in_one_line(dry, monkeypatch):
    monkeypatch.setenv("HSTU_LMSD_BACKEND", "CUDNN")
    status, _, err = dry()
    assert status == 2 and err.startswith("error: lmsd: backend CUDNN (from environment variable HSTU_LMSD_BACKEND)")


def test_why_not_candidates_alone(dry):
    _, out, _ = dry("--bind", "model.last_layer_targets_only=False", "--device-memory", "180GiB")
    assert "Last layer: in full: targets-only is off" in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--ranks", "0"), "--ranks 0"),
        (("--ranks-per-host", "-1"), "--ranks-per-host -1"),
        (("--device-kind", "abacus"), "a100, h100"),
        (("--device-memory", "much"), "--device-memory 'much'"),
        (("--host-memory", "0"), "--host-memory '0'"),
        (("--mean-rows", "1"), "--mean-rows 1"),
        (("--bind", "train.batch=3"), "train.batch_size"),
        (("--bind", "model.backend=CUDNN"), "CUDNN"),
    ],
)
def test_wrong_input_is_one_line(dry, arguments, word):
    status, _, err = dry(*arguments)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert word in err


def test_a_machine_without_a_dry_run_is_refused(small_config, capfd):
    with pytest.raises(SystemExit) as ended:
        main(["--config", small_config(), "--ranks", "4"])
    assert ended.value.code == 2
    assert "--ranks plans for another machine" in capfd.readouterr().err


def test_one_process_of_many_speaks(dry, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert dry()[:2] == (0, "")


def test_nothing_is_written(dry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dry()
    assert list(tmp_path.iterdir()) == []


def test_with_data_that_is_there(dry, small_config):
    status, out, _ = dry("--ranks", "2", config=small_config())
    assert status == 0
    assert "tiny: mean rows of" in out and "198 samples in" in out


@pytest.mark.parametrize("name", [*what_fits.RECOMPUTE])
def test_what_can_be_recomputed_is_an_option(name):
    assert f"model.{name}" in gin_files.option_names()
