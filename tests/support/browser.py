"""Chromium, driven through the pages that people look at. The system's own: `make browser` installs Debian's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str | None:
    """Return what tests of pages need and this machine lacks, or None."""
    if any(map(shutil.which, NAMES)):
        return None
    return "tests of pages need Chromium (`make browser`, or on Debian: apt-get install chromium)"


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless one. Its sandbox is off, since root may not have one, and its pages are the tests' own."""
    path = next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def wide_context(browser: Browser) -> Iterator[BrowserContext]:
    """Cookies and a cache of its own; pages of 1280 x 900."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    try:
        yield context
    finally:
        context.close()


@contextmanager
def empty_page(context: BrowserContext) -> Iterator[Page]:
    """Yield a page. Errors of its scripts are raised as AssertionError at the end."""
    errors: list[str] = []
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    try:
        yield page
    finally:
        page.close()
    assert not errors, errors
