from types import ModuleType

import pytest

from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def script(request: pytest.FixtureRequest) -> ModuleType:
    """Return the script that a file of tests is named after."""
    return load_script(request.path.stem.removeprefix("test_").removesuffix("_speculators"))
