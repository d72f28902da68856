"""One cache of compiled kernels for a whole test run, shared by its workers, removed after it."""

import os
import shutil
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist inherits the environment
        return
    folder = tempfile.mkdtemp(prefix="hopwell-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["HOPWELL_CACHE_DIR"] = folder
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores
