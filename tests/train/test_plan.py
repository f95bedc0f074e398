"""Plans of the public benchmark on meta tensors, and what the planner is told."""

import dataclasses
import pathlib

import pytest
import torch

from generative_recommenders.data.schema import FeatureSchema
from generative_recommenders.errors import UserError
from generative_recommenders.modules.dlrm_hstu import embedding_configs
from generative_recommenders.train import hardware, mlperf, plan
from generative_recommenders.train.datasets import FACTORIES
from generative_recommenders.train.dry_run import DryRunArguments, read_setting
from generative_recommenders.train.memory_model import peak
from generative_recommenders.train.plan_report import compact_lines, table_lines
from generative_recommenders.train.what_fits import plan as solve

GIB = 2**30
REPO = pathlib.Path(__file__).resolve().parents[2]
FIVE_B = (str(REPO / "configs" / "yambda_5b.gin"),)
ROWS = {
    "item_id": 9_390_624, "artist_id": 1_293_395, "album_id": 3_367_692, "uid": 1_000_001,
    "user_x_artist": 100_000_000, "user_x_album": 40_000_000, "user_x_hour": 24_000_000, "item_x_hour": 40_000_000,
    "artist_x_hour": 32_000_000, "user_x_is_organic": 2_000_000, "user_x_artist_x_hour": 40_000_000,
}  # fmt: skip
ITEMS = ("item_id", "artist_id", "album_id")
ROW_BYTES = 512 * 4 + 4  # with row-wise Adagrad's sum


def outcome(ranks=8, device="139GiB", host=None, bind=(), config=FIVE_B, **more):
    return solve(read_setting(DryRunArguments(config, tuple(bind), ranks, 8, "h200", device, host, **more)))


def placed(found):
    return {table.name: table.placement for table in found.plan.tables}


def test_the_benchmark_s_tables_are_known_without_its_data():
    found = outcome()
    assert {table.name: table.rows for table in found.plan.tables} == ROWS


def test_samples_are_those_of_the_benchmark_s_schedule():
    assert outcome().setting.work.train_samples == mlperf.TRAIN_SAMPLES
    assert outcome(bind=["yambda.train_days=30"]).setting.work.train_samples == mlperf.TRAIN_SAMPLES // 10


def test_eight_gpus_hold_the_benchmark_in_device_memory_with_eight_gib_to_spare():
    found = outcome()
    assert set(placed(found).values()) == {"device"}
    even = sum(ROWS.values()) * ROW_BYTES / 8
    for held in found.plan.table_bytes():
        assert held == pytest.approx(even, rel=1e-3)  # no table whole on one rank
        assert 139 * GIB - held - peak(found.load.shape).total >= 8 * GIB
    assert found.plan.free == pytest.approx(139 * GIB - max(found.plan.table_bytes()) - peak(found.load.shape).total)
    assert found.sizes.recompute_preprocessor  # what makes it fit, chosen in the configuration


def test_less_recomputed_the_least_looked_up_crosses_go_to_host_memory():
    found = outcome(host="1TiB", bind=["model.recompute_preprocessor=False"])
    where = placed(found)
    assert where["user_x_artist"] == "host" and all(where[name] == "device" for name in (*ITEMS, "uid"))
    in_host = [name for name, place in where.items() if place == "host"]
    fewest = sorted((name for name in ROWS if name not in ITEMS), key=lambda name: 1 / ROWS[name])[: len(in_host)]
    assert set(in_host) == set(fewest)
    assert found.plan.free >= 8 * GIB


def test_one_gpu_beside_a_terabyte_of_host_memory():
    found = outcome(ranks=1, host="1TiB")
    where = placed(found)
    in_host = {name for name, place in where.items() if place == "host"}
    assert in_host and all("_x_" in name for name in in_host)
    assert all(where[name] == "device" for name in (*ITEMS, "uid"))
    assert sum(found.plan.table_bytes("host")) == sum(ROWS[name] * ROW_BYTES for name in in_host) < 1024 * GIB
    assert found.plan.free >= 8 * GIB and found.plan.cache_share > 0


def test_one_small_gpu_without_host_memory_is_refused():
    found = outcome(ranks=1, device="80GiB")
    assert found.plan is None
    assert "560.0 GiB" in found.problem and "no host memory" in found.problem


def test_item_tables_whole_on_one_rank_are_refused_for_what_arrives_there():
    """8 x 1,024 x 2,663 rows of 2 KiB would arrive beside the tables in each step."""
    assert outcome(bind=["sharding.tables={'item_id': 'table_wise'}"]).plan is None
    crosses = outcome(bind=["sharding.tables={'user_x_hour': 'table_wise'}"], device="180GiB")
    assert next(table for table in crosses.plan.tables if table.name == "user_x_hour").layout == "table_wise"


def test_a_table_can_be_sent_to_host_memory_by_name():
    found = outcome(host="1TiB", bind=["sharding.tables={'user_x_hour': 'host'}"])
    assert {name for name, place in placed(found).items() if place == "host"} == {"user_x_hour"}


def test_host_memory_is_not_filled_beyond_what_there_is():
    assert outcome(ranks=1, host="200GiB").plan is None
    assert outcome(ranks=1, host="1TiB", bind=["sharding.tables={'user_x_artist': 'host'}"]).plan is not None


def test_half_as_wide_a_wire_halves_the_embeddings_bytes():
    wide, narrow = outcome(), outcome(bind=["sharding.wire_precision='bfloat16'"])
    for a, b in zip(wide.plan.tables, narrow.plan.tables, strict=True):
        assert sum(b.sent) == pytest.approx(sum(a.sent) / 2)
        assert b.ids == a.ids


def test_bytes_exchanged_by_hand():
    """Every rank gets 7/8 of its look-ups' rows from others, and gives their gradients back."""
    item = next(table for table in outcome().plan.tables if table.name == "item_id")
    lookups = 1024 * (2663 - 8)
    assert item.mean_lookups == lookups
    assert sum(item.received) == pytest.approx(8 * lookups * 2048 * 7 / 8, rel=1e-6)
    assert item.exchanged == pytest.approx(8 * lookups * (2 * 2048 + 8) * 7 / 8, rel=1e-6)


def test_the_planner_weighs_speed_by_the_mean_and_memory_by_the_fullest_batch():
    found = outcome()
    tables = {table.feature_names[0]: table for table in embedding_configs(found.sizes, 0)}
    mean, most = found.setting.work.mean_rows, found.load.shape.rows
    assert found.load.lookups(tables["uid"], mean) == [1.0]
    assert found.load.lookups(tables["item_id"], mean) == [2654.0, 1.0]
    item = next(table for table in found.plan.tables if table.name == "item_id")
    assert item.most_lookups == pytest.approx(1024 * (most - 8)) and most > mean


def test_reserved_bytes_leave_every_device():
    machine = plan.Machine("cuda", 2, 2, 100 * GIB)
    reservation = plan.StepReservation(30 * GIB)
    left = reservation.reserve(machine.topology(), 1, torch.nn.Module(), [], None)
    assert [device.storage.hbm for device in left.devices] == [70 * GIB] * 2
    assert [device.storage.hbm for device in machine.topology().devices] == [100 * GIB] * 2


@pytest.mark.parametrize(("samples", "most"), [(1, 4095), (1024, 3100), (8192, 2800)])
def test_the_fullest_batch_lies_between_mean_and_most(samples, most):
    """No two-valued distribution with that mean exceeds it in a million batches; one in 2e9 would, by a normal law."""
    work = outcome().setting.work
    bound = work.batch_rows(samples)
    assert work.mean_rows <= bound <= most
    share = (work.mean_rows - work.least_rows) / (work.most_rows - work.least_rows)  # of the longest samples
    draws = torch.distributions.Binomial(samples, torch.tensor(share)).sample((100_000,))
    means = work.least_rows + draws / samples * (work.most_rows - work.least_rows)
    assert float(means.max()) <= bound


def test_rows_are_measured_where_there_is_data(small_config):
    config = small_config()
    found = read_setting(DryRunArguments((config,)))
    dataset = FACTORIES["tiny"]()
    batches = list(dataset.batches(dataset.windows, 64))
    lengths = torch.cat([batch.uih["item_id"].lengths() for batch in batches]).double()
    assert found.work.mean_rows == pytest.approx(float(lengths.mean()) + 2, rel=0.02)
    assert found.work.most_rows == 8 + 2
    assert found.work.train_samples == lengths.numel()


def test_text_of_a_plan():
    lines = table_lines(outcome().plan)
    assert len(lines) == 1 + len(ROWS)
    assert "item_id" in "".join(lines) and "78,103.4" in "".join(lines)
    said = compact_lines(outcome().plan)
    assert len(said) == 3 and "3,029 in the fullest batch" in said[1]


@pytest.mark.parametrize(
    ("text", "size"), [("139GiB", 139 * GIB), ("1TiB", 1024 * GIB), ("80 GB", 80 * 10**9), ("0.5gib", GIB // 2)]
)
def test_sizes(text, size):
    assert hardware.parse_bytes("--x", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0GiB", "1 furlong", "1e3", "nan", "1GiBGiB"])
def test_sizes_that_are_none(text):
    with pytest.raises(UserError, match="--device-memory"):
        hardware.parse_bytes("--device-memory", text)


def test_mean_rows_that_no_sample_has():
    with pytest.raises(UserError, match="--mean-rows 5000"):
        outcome(mean_rows=5000.0)
    assert outcome(mean_rows=3000.0).setting.work.mean_rows == 3000


@pytest.mark.parametrize(
    ("bind", "word"),
    [
        ("yambda.size='50m'", "not known before"),
        ("yambda.item_features=['item_id', 'nothing']", "nothing"),
        ("yambda.contextual_features=['mood']", "mood"),
        ("yambda.table_rows={'mood': 3}", "mood"),
        ("sharding.tables={'mood': 'row_wise'}", "mood"),
        ("sharding.tables={'user_x_hour': 'host'}", "sharding.host_memory_gb"),
    ],
)
def test_what_cannot_be_planned_is_said(bind, word):
    with pytest.raises(UserError, match=word):
        outcome(bind=[bind])


def test_options_of_the_data_set_shape_the_tables():
    found = outcome(bind=["yambda.table_rows_limit=1000000", "yambda.history_length=1020"])
    rows = {table.name: table.rows for table in found.plan.tables}
    assert rows["user_x_artist"] == 1_000_000 and rows["item_id"] == ROWS["item_id"]
    assert found.setting.work.most_rows == 1020 + 9
    assert found.setting.work.mean_rows == pytest.approx(2654 * 1020 / 4086 + 9)


def test_a_manifest_wins_over_the_published_sizes(tmp_path):
    (tmp_path / "cache" / "5b").mkdir(parents=True)
    with pytest.raises(UserError, match="not complete"):
        outcome(bind=[f"yambda.path='{tmp_path}'"])


def test_tables_of_features_whose_names_are_escaped_are_known_by_the_features():
    where = {"geo.city": "host", "type": "table_wise"}
    setting = read_setting(DryRunArguments(FIVE_B, (f"sharding.tables={where}",), host_memory="1TiB"))
    rows = {"item_id": 9000, "geo.country": 3000, "uid": 1000, "geo.city": 2000, "type": 4000}
    schema = FeatureSchema(("item_id", "geo.country"), ("uid", "geo.city", "type"), rows)
    work = dataclasses.replace(setting.work, schema=schema)
    found = solve(dataclasses.replace(setting, work=work)).plan
    tables = {table.name: table for table in found.tables}
    assert {name: table.rows for name, table in tables.items()} == rows
    assert [name for name, table in tables.items() if table.placement == "host"] == ["geo.city"]
    assert [name for name, table in tables.items() if table.layout == "table_wise"] == ["type"]
    assert tables["geo.country"].mean_lookups == pytest.approx(1024 * (work.mean_rows - 3))
    assert tables["geo.city"].mean_lookups == tables["type"].mean_lookups == 1024
    assert [table.kind for table in found.tables] == ["context"] * 3 + ["item"] * 2


def test_a_sharding_of_escaped_tables_is_refused_under_the_feature_s_name():
    with pytest.raises(UserError, match="sharding.tables names 'geo.country'"):
        outcome(bind=["sharding.tables={'geo.country': 'row_wise'}"])


def test_no_process_group_is_made():
    outcome()
    assert not torch.distributed.is_initialized()
