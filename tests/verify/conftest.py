"""The device's kernels as a fixture: with it, verification goes through them."""

import numpy as np
import pytest

from tests.helpers.interpreter import patch_language_once
from tests.verify import device


@pytest.fixture(scope="module")
def kernels_alone():
    """The package of kernels, ready to be called."""
    if (reason := device.missing()) is not None:
        pytest.skip(reason)
    from paceline.verify.cuda import kernels as package

    if device.interpreted():
        patch_language_once()
    with np.errstate(all="ignore"):  # a device does not warn when a number overflows
        yield package


@pytest.fixture
def kernels(kernels_alone, monkeypatch):
    """The same, and every tensor verification meets is sent to them."""
    served = device.served(kernels_alone)
    monkeypatch.setattr("paceline.verify.dispatch.kernels", lambda tensor: served)
    return kernels_alone


@pytest.fixture(params=["host", "kernels"])
def path(request):
    """Both, in turn."""
    if request.param == "kernels":
        request.getfixturevalue("kernels")
    return request.param
