"""Names of tables: any feature's, reversibly, and such that a module can have them."""

from torch import nn

from generative_recommenders.modules.table_names import feature_of_table, table_name


def test_tables_are_escaped_and_back():
    names = [*dir(nn.ModuleDict()), "geo.country", "%2E", "%74ype", ".", "..", " a ", "rate%", "{x}", "uid"]
    names += ["user_x_artist", "item_id", "%", "%%41", "é.%C3"]
    tables = [table_name(name) for name in names]
    assert [feature_of_table(table) for table in tables] == names
    assert len(set(tables)) == len(set(names))
    modules = nn.ModuleDict()
    for table in tables:
        modules[table] = nn.Identity()
    for name in ("uid", "item_id", "user_x_artist", "with space", "rate%", "Ärger ☕"):
        assert table_name(name) == name
