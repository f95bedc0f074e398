"""The listing of options explains each one."""

import pytest

from generative_recommenders.train.datasets import _KNOWN, parameters
from generative_recommenders.train.options_table import DATA_OPTIONS, options_table


@pytest.mark.parametrize("name", sorted(_KNOWN))
def test_every_option_of_a_data_set_says_what_it_means(name):
    text = options_table()
    for option in parameters(name):
        assert option in DATA_OPTIONS, f"{name}.{option}"
        assert f"    {name}.{option} " in text
