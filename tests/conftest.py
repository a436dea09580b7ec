"""What the tests of the scripts and of the compile targets share."""

from pathlib import Path

import pytest

from monorepo import artifact
from monorepo.manifest import Manifest

ROOT = Path(__file__).parents[1]
MANIFEST = Manifest.load(ROOT)


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory each kernel is built in, by repository; built anew, so never stale."""
    out = tmp_path_factory.mktemp("builds")
    return {
        kernel.repo_id: artifact.build(ROOT, kernel, backends=["cpu"], out=out)
        for kernel in MANIFEST.kernels
    }
