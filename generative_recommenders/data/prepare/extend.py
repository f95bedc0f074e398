"""Keeping the numbers of an earlier cache: known ids stay what they were, new ones are appended.

A table trained on the earlier cache then fits the new one row by row, and so do the tables of crosses, which hash
numbers: they are also kept at the size that the earlier cache gave them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Mapping

import duckdb
import numpy as np
import pyarrow

from generative_recommenders.data.cache import EventCache
from generative_recommenders.data.identity import Vocabulary, fingerprint_of
from generative_recommenders.data.prepare.engine import name
from generative_recommenders.data.prepare.source import Source
from generative_recommenders.errors import UserError
from generative_recommenders.paths import user_path

_SPOKEN = {"int": "whole numbers", "text": "text"}


@dataclasses.dataclass(frozen=True)
class Base:
    """The numbering of a complete cache.

    ``spaces``: id space → its raw ids. ``generations``: id space → how many ids it had after each preparation of the
    chain, the first one first. ``cross_users``: users that crosses are sized by.
    """

    folder: pathlib.Path
    spaces: Mapping[str, Vocabulary]
    generations: Mapping[str, list[int]]
    attributes: tuple[str, ...]
    context: tuple[str, ...]
    cross_users: int

    @classmethod
    def open(cls, path: str | pathlib.Path, target: pathlib.Path) -> Base:
        """The numbering of the cache in ``path``, for a new cache in ``target``."""
        folder = user_path(path)
        if folder.resolve() == target.resolve():
            raise UserError(
                f"--extend {folder} is the folder of the new cache itself: name another one as --cache, the earlier "
                "cache is read and stays as it is"
            )
        try:
            cache = EventCache.open(folder)
        except UserError as error:
            raise UserError(f"--extend: {error}") from None
        unknown = [space for space in cache.vocab if space not in cache.ids]
        if unknown:
            raise UserError(f"--extend {folder}: it has no raw ids of {unknown[0]!r}, so its numbers cannot be kept")
        generations = {space: list(cache.generations.get(space, [ids.rows - 1])) for space, ids in cache.ids.items()}
        return cls(folder, cache.ids, generations, tuple(cache.attributes), tuple(cache.context), cache.cross_users)

    @functools.cached_property
    def digest(self) -> str:
        """Of everything that shapes an extension, and nothing else: not the path, not the events."""
        spaces = sorted((space, ids.rows, ids.fingerprint) for space, ids in self.spaces.items())
        content = (spaces, sorted(self.generations.items()), self.attributes, self.context, self.cross_users)
        return hashlib.sha256(repr(content).encode()).hexdigest()

    def check(self, source: Source, connection: duckdb.DuckDBPyConnection) -> None:
        """``UserError`` unless the source has the base's attributes and context columns, and ids of the same types."""
        for kind, here, there in (
            ("attributes", source.attributes, self.attributes),
            ("context columns", source.context, self.context),
        ):
            if set(here) != set(there):
                raise UserError(
                    f"--extend {self.folder}: it has the {kind} {_listed(there)}, named are {_listed(here)}: name the "
                    "same ones, or prepare without --extend"
                )
        columns = [("uid", source.relation, source.user), ("item_id", source.relation, source.item)]
        columns += [(space, source.relation, expression) for space, expression in source.context.items()]
        for space, file in source.attributes.items():
            columns += [("item_id", file.relation, name(file.item_column))]
            columns += [(space, file.relation, name(file.attribute_column))]
        for space, relation, expression in columns:
            self._check_kind(space, relation, expression, connection)

    def _check_kind(self, space: str, relation: str, expression: str, connection: duckdb.DuckDBPyConnection) -> None:
        known, here = self.spaces[space].kind, _kind_of(connection, relation, expression)
        if known is None or known == here:
            return
        if connection.execute(f"SELECT 1 FROM {relation} WHERE {expression} IS NOT NULL LIMIT 1").fetchall() == []:
            return  # a column without values has whatever type
        raise UserError(
            f"--extend {self.folder}: its ids of {space} are {_SPOKEN[known]}, those of column {expression} are "
            f"{_SPOKEN[here]}, so no id would be known: give the column the type it had (numbers that are text belong "
            "into parquet), or prepare without --extend"
        )


def number_ids(
    connection: duckdb.DuckDBPyConnection, table: str, found: str, base: Base | None = None, space: str = ""
) -> None:
    """Make ``table`` of the ids that the SQL ``found`` gives (_original, _events): _original, _dense, _events.

    Dense ids count from 1 (0 stays unknown) in the order of the originals. With ``base``, its ids of ``space`` come
    first, under their numbers, also those that were not found; and _rank is the place among the originals, which the
    order of events goes by.
    """
    if base is None:
        connection.execute(
            f"""CREATE OR REPLACE TEMP TABLE {name(table)} AS
            SELECT _original, (row_number() OVER (ORDER BY _original))::UINTEGER AS _dense, _events FROM ({found})"""
        )
        return
    ids = base.spaces[space]
    text = "text" in (ids.kind or _kind_of(connection, f"({found})", "_original"))
    kind = "VARCHAR" if text else "BIGINT"
    connection.register("base_ids", _known_ids(base, space, text))
    connection.execute("CREATE OR REPLACE TEMP TABLE known AS SELECT _original, _dense FROM base_ids")
    connection.unregister("base_ids")
    connection.execute(
        f"""CREATE OR REPLACE TEMP TABLE {name(table)} AS
        WITH found AS (SELECT _original::{kind} AS _original, _events FROM ({found})),
        numbered AS (
            SELECT known._original, known._dense, coalesce(found._events, 0)::BIGINT AS _events
            FROM known LEFT JOIN found ON known._original = found._original
            UNION ALL
            SELECT _original, {ids.rows - 1} + row_number() OVER (ORDER BY _original), _events
            FROM found ANTI JOIN known USING (_original))
        SELECT _original, _dense::UINTEGER AS _dense, _events,
            (row_number() OVER (ORDER BY _original))::UINTEGER AS _rank FROM numbered"""
    )
    connection.execute("DROP TABLE known")


def generations(base: Base, vocab: Mapping[str, int]) -> dict[str, list[int]]:
    """``Base.generations`` of the new cache, whose spaces have so many rows."""
    return {space: [*base.generations[space], rows - 1] for space, rows in vocab.items()}


def _known_ids(base: Base, space: str, text: bool) -> pyarrow.Table:
    """(_original, _dense) of the base's ids; ``UserError`` if they are not those that its manifest speaks of."""
    ids = base.spaces[space]
    originals = ids.originals()
    if fingerprint_of([originals], ids.rows - 1) != ids.fingerprint:
        raise UserError(f"--extend {base.folder}: its raw ids of {space} do not fit their checksum: prepare it again")
    dense = np.arange(1, ids.rows, dtype=np.int64)
    kind = pyarrow.large_string() if text else pyarrow.int64()
    return pyarrow.table({"_original": originals.cast(kind), "_dense": dense})


def _kind_of(connection: duckdb.DuckDBPyConnection, relation: str, expression: str) -> str:
    described = connection.execute(f"DESCRIBE SELECT {expression} AS id FROM {relation}").fetchall()[0]
    return "text" if described[1] == "VARCHAR" else "int"


def _listed(names: Mapping | tuple) -> str:
    return ", ".join(sorted(names)) or "none"
