"""Every test here carries the marker `series`: it reads pristine wheels, fetched once (about 1 GB)."""

from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "series: needs the pristine wheels of the releases, from the cache or the network"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.series)
