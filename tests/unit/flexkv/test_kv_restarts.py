"""How often something that died is started again."""

from __future__ import annotations

import pytest

from flexkv_radix.restarts import Restarts


def test_pauses_grow_until_it_is_given_up() -> None:
    restarts = Restarts(max_deaths=5, window_s=300)
    assert [restarts.died(float(second)) for second in range(5)] == [0.0, 1.0, 2.0, 4.0, None]
    assert str(restarts) == "5 deaths within 300 s"


def test_old_deaths_do_not_count() -> None:
    restarts = Restarts(max_deaths=2, window_s=300)
    for death in range(10):
        assert restarts.died(300.0 * death) == 0.0
    assert restarts.died(300.0 * 9 + 299) is None


@pytest.mark.parametrize("max_deaths", [1, 3])
def test_the_last_death_is_final(max_deaths: int) -> None:
    restarts = Restarts(max_deaths)
    pauses = [restarts.died(0.0) for _ in range(max_deaths)]
    assert pauses.index(None) == max_deaths - 1
