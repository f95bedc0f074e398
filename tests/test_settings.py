"""The registry of environment variables: parsing, one declaration each, one place that reads, a current page."""

import pathlib
import re

import pytest

from generative_recommenders import settings
from generative_recommenders.errors import UserError

REPO = pathlib.Path(__file__).resolve().parents[1]


def test_the_documented_table_is_current():
    page = (REPO / "docs" / "knobs.md").read_text()
    assert page == settings.knob_page() + "\n", "python -m generative_recommenders.settings > docs/knobs.md"


def test_only_the_registry_reads_the_environment():
    reads = re.compile(r"os\.(environ|getenv|putenv)")
    found = [
        str(path.relative_to(REPO))
        for path in (REPO / "generative_recommenders").rglob("*.py")
        if reads.search(path.read_text()) and path.name != "settings.py"
    ]
    assert found == []


@pytest.mark.parametrize("knob", settings.knobs().values(), ids=lambda knob: knob.name)
def test_every_knob_takes_its_default_and_refuses_nonsense(knob, monkeypatch):
    monkeypatch.delenv(knob.name, raising=False)
    assert settings.get(knob.name) == knob.default
    if knob.default is not None:
        assert knob.parse(str(knob.default)) == knob.default
    if knob.kind is not str or knob.choices:
        with pytest.raises(UserError, match=knob.name):
            knob.parse("no such value")
    monkeypatch.setenv(knob.name, "")
    with pytest.raises(UserError, match="empty"):
        settings.get(knob.name)


def test_a_second_declaration_is_a_programming_error():
    with pytest.raises(RuntimeError, match="HSTU_BACKEND"):
        settings.declare(settings.Knob("HSTU_BACKEND", str, None, ""))


def test_an_undeclared_name_is_a_key_error():
    with pytest.raises(KeyError):
        settings.get("HSTU_NO_SUCH_KNOB")


def test_a_misspelt_variable_is_noticed(monkeypatch):
    monkeypatch.setenv("HSTU_BACKENDS", "TRITON")
    monkeypatch.setenv("HSTU_PYTHON", "python3")
    monkeypatch.setenv("HSTU_BACKEND", "TRITON")
    (warning,) = [each for each in settings.strangers() if "HSTU_BACKENDS" in each or "HSTU_PYTHON" in each]
    assert "HSTU_BACKENDS" in warning and "did you mean HSTU_BACKEND?" in warning


def test_what_is_no_number_of_a_schedulers_is_passed_over(monkeypatch):
    for name in (*settings._TASKS, *settings._TASKS.values(), *settings._NODES, "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for text in ("²", "4(x2)", "", "-1"):
        monkeypatch.setenv("SLURM_NTASKS", text)
        assert settings.lonely_task() is None
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert "SLURM_NTASKS=4" in settings.lonely_task()
