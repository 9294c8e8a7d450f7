"""The page of a router in a browser, with a cluster under load behind it.

With TETRI_PAGE_PICTURE=FILE a picture of it is left there, for docs/pictures/page.png.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.prompts import completion
from tests.eventually import eventually
from tests.needed import needed, require_command

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

require_command("chromium", "chromium")
require_command("chromedriver", "chromium-driver")
needed("selenium")

from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

KEY = "key-of-the-test-7q"
OWN = {"roles": ("--prefill", "1", "--decode", "1", "--api-key", KEY, "--ttft-slo", "2")}
SIZE = (1400, 800)
PHONE = 400
MOST_BYTES = 200_000  # of a picture
CLIENTS = 6
PATIENCE_S = 30.0


class Page:
    """What a person sees of the page, and does with it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def one(self, css: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        """The text of all that is so named, as scripts see it."""
        read = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent).join()"
        return str(self.driver.execute_script(read, css))

    def until(self, css: str, part: str, timeout_s: float = PATIENCE_S) -> None:
        eventually(lambda: part in self.text(css), timeout_s, f"{part!r} in {css}")

    def type_key(self, key: str) -> None:
        field = self.one("#key")
        field.clear()
        field.send_keys(key, Keys.ENTER)

    def more(self, count: int = 2) -> None:
        """Wait for snapshots after the one that is shown."""
        read = "return shown.seq"
        first = self.driver.execute_script(read)
        eventually(lambda: self.driver.execute_script(read) >= first + count, PATIENCE_S)

    def problems(self) -> list[str]:
        """What the browser's console has got since the last call."""
        logged = self.driver.get_log("browser")
        return [each["message"] for each in logged if each["level"] in ("SEVERE", "WARNING")]

    def emulate(self, **media: str) -> str:
        """Prefer something, as a system's settings do; the colour of the background then."""
        features = [{"name": key.replace("_", "-"), "value": value} for key, value in media.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        read = "return getComputedStyle(document.body).backgroundColor"
        return str(self.driver.execute_script(read))

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    words = ["headless=new", "disable-dev-shm-usage", "disable-gpu", f"user-data-dir={folder}"]
    for word in [*words, *(["no-sandbox"] if os.geteuid() == 0 else [])]:
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(str(shutil.which("chromedriver"))))
    try:
        page = Page(driver)
        page.resize(*SIZE)
        yield page
    finally:
        driver.quit()


def ask(url: str, body: Any = None) -> Any:
    """A request with the key; all of its response."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=100) as response:
        return response.read()


@contextmanager
def load(url: str) -> Iterator[None]:
    """Streams without a pause."""
    is_over = threading.Event()

    def client(number: int) -> None:
        tokens = 100 + 40 * number
        while not is_over.is_set():
            body = completion(300, max_tokens=tokens, stream=True)
            try:
                ask(f"{url}/v1/completions", body)
            except (OSError, HTTPException):  # the cluster has ended
                return

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        is_over.set()
        for each in threads:
            each.join(120)


@pytest.fixture(scope="module")
def page(own_started: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Open, under load, and let in."""
    with browser(tmp_path_factory.mktemp("browser")) as made, load(own_started.url):
        made.driver.get(own_started.url + "/")
        made.until("#message", "The router needs an API key")
        assert made.driver.switch_to.active_element == made.one("#key")
        made.type_key("wrong")
        made.until("#message", "The router does not know this API key")
        told = made.problems()
        assert len(told) == 2, told
        assert all("401" in each for each in told), told
        made.type_key(KEY)
        made.until("#link", "live")
        assert made.text("#message") == ""
        yield made


def test_instances_and_requests_are_shown(page: Page) -> None:
    page.until("#rows th", "prefill-0,decode-0")
    assert page.text("#rows .role") == "prefill,decode"
    page.until("#rows tr:first-child td:nth-child(3)", "ready")
    page.until(".decoding", "decode")
    eventually(lambda: int(page.text(".lane.decoding b")) > 0, PATIENCE_S, "a request decodes")
    page.until("#requests td", "prefill-0 → decode-0")
    page.until("#lanes .dim", "output tokens")
    eventually(lambda: page.text("#charts figure:first-child b") != "–", PATIENCE_S, "a TTFT")
    eventually(lambda: page.one("#charts path").get_attribute("d"), PATIENCE_S, "a line")
    assert page.problems() == []


def test_a_click_sets_the_mode(page: Page, own_started: Cluster) -> None:
    for mode in ("whole", "split"):
        page.one(f"button[data-mode={mode}]").click()
        page.until("#message", f"mode {mode}")
        assert json.loads(ask(f"{own_started.url}/tetri/v1/mode")) == {"mode": mode}
        page.until("#modes [aria-pressed=true]", mode)
    assert page.problems() == []


def test_an_instance_flips_by_keyboard_while_numbers_change(page: Page) -> None:
    button = page.one("[aria-label='flip decode-0']")
    page.driver.execute_script("arguments[0].focus()", button)
    page.more()
    assert page.driver.switch_to.active_element == button
    button.send_keys(Keys.ENTER)
    assert page.one("#order").is_displayed()
    page.one("#role").send_keys("both")
    page.one("#do").send_keys(Keys.ENTER)
    page.until("#message", "decode-0 becomes a both instance")
    page.until("#rows .role", "both", 60)
    page.until("#events", "ordered on the page", 60)
    assert "decode-0 decode → both" in page.text("#events")
    page.one("[aria-label='drain prefill-0']").click()
    page.one("#order").send_keys(Keys.ESCAPE)
    assert not page.one("#order").is_displayed()
    page.more()
    assert page.text("#rows th") == "prefill-0,decode-0"
    assert page.problems() == []


def test_a_picture_is_left_where_it_is_asked_for(page: Page, tmp_path: Path) -> None:
    wanted = os.environ.get("TETRI_PAGE_PICTURE")
    path, bins = Path(wanted or tmp_path / "page.png"), 24 if wanted else 2
    read = "return shown.bins.served.filter(Boolean).length"
    eventually(lambda: page.driver.execute_script(read) >= bins, 200, f"{bins} bins")
    assert page.driver.save_screenshot(str(path))
    assert 20_000 < path.stat().st_size <= MOST_BYTES


def test_a_refused_order_is_explained(page: Page) -> None:
    page.one("[aria-label='drain decode-0']").click()
    page.one("#do").click()
    page.until("#message.alarm", "decode-0")
    assert page.text("#rows th") == "prefill-0,decode-0"
    assert all("409" in each for each in page.problems())


def test_everything_has_a_name_and_a_place(page: Page) -> None:
    for each in page.driver.find_elements(By.CSS_SELECTOR, "button, input, select, svg[role=img]"):
        if each.is_displayed():
            assert each.accessible_name, each.get_attribute("outerHTML")
    assert len(page.driver.find_elements(By.CSS_SELECTOR, "main")) == 1
    for each in page.driver.find_elements(By.CSS_SELECTOR, "thead th"):
        assert each.get_attribute("scope") == "col"
    for each in page.driver.find_elements(By.CSS_SELECTOR, "section"):
        assert each.aria_role == "region"
        assert each.accessible_name


def test_it_is_dark_or_light_and_fits_a_phone(page: Page) -> None:
    light = page.emulate(prefers_color_scheme="light")
    dark = page.emulate(prefers_color_scheme="dark")
    assert light != dark
    still = page.emulate(prefers_reduced_motion="reduce")
    assert still == light
    moves = "return getComputedStyle(document.querySelector('#lanes i')).transitionDuration"
    eventually(lambda: page.driver.execute_script("return document.querySelector('#lanes i')"))
    assert page.driver.execute_script(moves) == "0s"
    page.emulate()
    page.resize(PHONE, 800)
    page.more()
    read = "return document.documentElement.scrollWidth"
    assert page.driver.execute_script(read) <= PHONE
    page.resize(*SIZE)


def test_a_router_that_ends_is_noticed(page: Page, own_started: Cluster) -> None:
    own_started.stop()
    page.until("#link", "no connection to the router")
    assert "stale" in page.one("body").get_attribute("class")
