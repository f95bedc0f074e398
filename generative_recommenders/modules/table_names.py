"""Names of embedding tables: the feature's, escaped where a module cannot have it.

A table is a sub-module, so its name is a part of dotted parameter names and must not be an attribute of the container:
``geo.country`` and ``type`` are not possible. Escaping is that of addresses on the web, ``geo%2Ecountry`` and
``%74ype``; names that are possible stay as they are, and so do those of earlier checkpoints.
"""

from __future__ import annotations

import functools
import re
import urllib.parse

from torch import nn

_LOOKS_ESCAPED = re.compile("%(?=[0-9A-Fa-f]{2})")


@functools.cache
def table_name(feature: str) -> str:
    """The table's name of a feature; ``feature_of_table`` is its inverse."""
    name = _LOOKS_ESCAPED.sub("%25", feature).replace(".", "%2E")
    if hasattr(_container(), name):
        first = name[0].encode()
        name = "".join(f"%{byte:02X}" for byte in first) + name[1:]
    return name


def feature_of_table(name: str) -> str:
    """The feature whose table has this name."""
    return urllib.parse.unquote(name)


@functools.cache
def _container() -> nn.ModuleDict:
    return nn.ModuleDict()
