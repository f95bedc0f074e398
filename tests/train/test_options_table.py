"""The listing of options explains each one."""

import pytest

from generative_recommenders.data.history import STRATEGIES
from generative_recommenders.train.datasets import _KNOWN, DATA_OPTIONS, parameters
from generative_recommenders.train.options_table import options_table


@pytest.mark.parametrize("name", sorted(_KNOWN))
def test_every_option_of_a_data_set_says_what_it_means(name):
    text = options_table()
    for option in parameters(name):
        assert option in DATA_OPTIONS, f"{name}.{option}"
        assert f"    {name}.{option} " in text


def test_the_meaning_of_an_option_of_every_strategy_names_none():
    """``scan_limit`` bounds what every strategy looks through (the oracle of test_dataset.py has it for both)."""
    assert not [strategy for strategy in STRATEGIES if strategy in DATA_OPTIONS["scan_limit"].doc]
