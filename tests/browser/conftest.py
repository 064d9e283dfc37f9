"""One Chromium for the tests of a module; skipped where the machine has none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.support.browser import chromium, empty_page, missing, wide_context


# By module: until playwright is closed its event loop is the thread's, and no other module's tests may meet it.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    absent = missing()
    if absent is not None:
        pytest.skip(absent)
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Empty, in a context of its own; what goes wrong in its scripts fails the test."""
    with wide_context(browser) as context, empty_page(context) as opened:
        yield opened
