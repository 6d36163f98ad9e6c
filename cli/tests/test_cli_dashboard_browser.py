"""The dashboard's page in a real Chromium: figures, refresh, staleness, sizes, color schemes, keyboard, no other host.

KVPOOL_SCREENSHOTS=DIRECTORY keeps pictures of both widths in both color schemes.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cli_chromium import PROGRAM, Browser
from cli_dashboard import Dashboard, FakeCluster
from cli_documents import documents
from op_diagnosis_world import World, status

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.skipif(not PROGRAM, reason="Chromium is not installed on this machine"),
    pytest.mark.timeout(300),
]
SIZES = [(375, 800), (1440, 1000)]
STATE = "document.body.dataset.state"


def busy_world() -> World:
    """Four nodes: one does not answer, one cannot read from another, one has a failing drive; a shared tier."""
    world = World()
    world.statuses |= {"node-2": status("node-2"), "node-3": status("node-3")}
    names = list(world.statuses)
    for number, (node, raw) in enumerate(world.statuses.items()):
        rows = [
            {"node": peer, "address": "", "state": "unverified" if peer == "node-2" else "reachable"}
            for peer in names
            if peer != node
        ]
        raw["reachability"] = {"peers": 3, "reachable": 2, "unreachable": 0, "unverified": 1, "rows": rows}
        sweep = {"used_bytes": 3 * 2**40, "capacity_bytes": 10 * 2**40, "last_s_ago": 60.0}
        raw["shared"] = {"configured": True, "available": number != 1, "sweep": sweep}
        raw["used_bytes"] = (2 + 2 * number) * 2**30
        raw["hits"] = {"local": 5000, "peer": 2500, "shared": 800}
        raw["bytes"] = {"local": 400 * 2**30, "peer": 200 * 2**30, "shared": 64 * 2**30}
    failed = {"node": "node-0", "address": "", "state": "unreachable", "reason": "timeout"}
    world.statuses["node-1"]["reachability"] |= {"reachable": 1, "unreachable": 1}
    world.statuses["node-1"]["reachability"]["rows"][0] = failed
    world.statuses["node-1"]["drives"] = {"nvme": "failing"}
    world.set_misses("node-0", never_stored=30_000, evicted_capacity=15_000, peer_unreachable=5_000)
    world.silent_nodes = {"node-3"}
    return world


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.fixture
def cluster(tmp_path: Path) -> FakeCluster:
    return FakeCluster(tmp_path)


@pytest.fixture
def dashboard(cluster: FakeCluster) -> Iterator[Dashboard]:
    cluster.write(documents(busy_world()))
    started = Dashboard(cluster.directory, "--docs-url", "https://docs.example/kvpool")
    yield started
    started.end()


def open_page(browser: Browser, url: str) -> None:
    browser.requests.clear()
    browser.messages.clear()
    browser.call("Page.navigate", url=url)
    browser.wait(f"document.body && {STATE}", lambda state: state == "fresh")


def text(browser: Browser, selector: str) -> str:
    return str(browser.run(f"document.querySelector({selector!r}).innerText"))


def test_all_parts_are_shown_and_no_other_host_is_asked(browser: Browser, dashboard: Dashboard):
    browser.emulate(1440, 1000, "light")
    open_page(browser, dashboard.url)
    assert "Pool kvpool-system/chat" in text(browser, "h1")
    assert "KVP0401" in text(browser, "#findings")
    assert "llama" in text(browser, "#models")
    assert {"node-0", "node-1", "node-2", "node-3"} <= set(text(browser, "#nodes").split())
    assert "node-1 from node-0: unreachable: timeout" in text(browser, "#peers")
    assert "own node" in text(browser, "#prompt")
    assert "3Ti" in text(browser, "#tiers")
    links = browser.run("[...document.querySelectorAll('#findings a')].map(a => a.href)")
    assert "https://docs.example/kvpool/reference/findings/#kvp0401" in links
    origin = dashboard.url.split("/", 3)[2]
    assert browser.requests
    assert [url for url in browser.requests if not url.startswith((f"http://{origin}/", "data:"))] == []
    assert browser.messages == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_nothing_is_wider_than_the_window(browser: Browser, dashboard: Dashboard, width: int, height: int, scheme: str):
    browser.emulate(width, height, scheme)
    open_page(browser, dashboard.url)
    assert browser.run("document.documentElement.scrollWidth") <= width
    hidden = browser.run(
        "[...document.querySelectorAll('h1, h2, .value, .badge, th, td, summary, dd')].filter(e => e.offsetParent &&"
        " !e.closest('.scroll') && (e.getBoundingClientRect().right > innerWidth || e.scrollWidth > e.clientWidth + 1"
        " && getComputedStyle(e).display !== 'inline')).map(e => e.innerText)"
    )
    assert hidden == []
    dark = browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 28)"
    assert dark == (scheme == "dark")
    picture = browser.screenshot()
    assert struct.unpack(">I", picture[16:20]) == (width,)
    if os.environ.get("KVPOOL_SCREENSHOTS"):
        Path(os.environ["KVPOOL_SCREENSHOTS"], f"dashboard-{width}-{scheme}.png").write_bytes(picture)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_the_contrast_of_wcag_aa(browser: Browser, dashboard: Dashboard, scheme: str):
    browser.emulate(1440, 1000, scheme)
    open_page(browser, dashboard.url)
    assert browser.run(CONTRAST) == []


def test_the_page_refreshes_itself_and_keeps_what_is_open_and_focused(
    browser: Browser, cluster: FakeCluster, dashboard: Dashboard
):
    browser.emulate(1440, 1000, "light")
    open_page(browser, dashboard.url)
    browser.run("document.querySelector('#findings summary').focus()")
    browser.press("Enter", 13)
    assert browser.run("document.querySelector('#findings details').open")
    assert "Fix" in text(browser, "#findings details")
    kept = browser.run("document.activeElement.dataset.key")
    world = busy_world()
    for node in world.statuses:
        world.set_misses(node, never_stored=100_000)
    cluster.write(documents(world))
    browser.wait("document.querySelector('#facts .fact:nth-child(3) .value').innerText", lambda rate: rate == "0 %")
    assert browser.run("document.querySelector('#findings details').open")
    assert browser.run("document.activeElement.dataset.key") == kept


def test_a_cluster_that_does_not_answer_is_said_and_its_return_too(
    browser: Browser, cluster: FakeCluster, dashboard: Dashboard
):
    open_page(browser, dashboard.url)
    cluster.set_flag("down")
    browser.wait(STATE, lambda state: state == "stale")
    assert "The cluster does not answer: Unable to connect" in text(browser, "#stale")
    assert "node-0" in text(browser, "#nodes")
    cluster.set_flag("down", False)
    browser.wait(STATE, lambda state: state == "fresh")
    assert browser.run("document.getElementById('stale').hidden")
    dashboard.end()
    browser.wait(STATE, lambda state: state == "stale")
    assert "has ended" in text(browser, "#stale")


def test_every_control_is_reached_by_the_keyboard_and_shows_it(browser: Browser, dashboard: Dashboard):
    browser.emulate(1440, 1000, "light")
    open_page(browser, dashboard.url)
    browser.press("Tab", 9)
    assert browser.run("document.activeElement.className") == "skip"
    wanted = browser.run(
        "[...document.querySelectorAll('a, summary, [tabindex=\"0\"]')].filter(e =>"
        " !e.closest('[hidden]') && (e.tagName === 'SUMMARY' || !e.closest('details'))).length"
    )
    reached = [str(browser.run(FOCUSED))]
    while len(reached) < 2 * wanted and "matrix" not in reached[-1]:
        browser.press("Tab", 9)
        reached.append(str(browser.run(FOCUSED)))
    assert len(reached) == len(set(reached)) == wanted
    assert all(one.endswith("solid") for one in reached)


def test_text_of_the_cluster_is_never_markup(browser: Browser, cluster: FakeCluster, dashboard: Dashboard):
    world = busy_world()
    world.statuses["node-0"]["cache"]["models"][0]["model"] = "<img src=x onerror=document.title='taken'>"
    cluster.write(documents(world))
    open_page(browser, dashboard.url)
    browser.wait("document.getElementById('models').innerText", lambda shown: "<img" in shown)
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert "taken" not in browser.run("document.title")


def test_the_last_of_several_pools_is_chosen_by_its_link(browser: Browser, cluster: FakeCluster, dashboard: Dashboard):
    found = documents(World())
    (pool,) = found.objects["pools"]
    found.objects["pools"] = [pool, {**pool, "metadata": {**pool["metadata"], "name": "spare"}}]
    cluster.write(found)
    open_page(browser, dashboard.url)
    browser.wait("document.querySelectorAll('nav a').length", lambda count: count == 2)
    browser.run("document.querySelector('nav a:last-child').click()")
    browser.wait("document.querySelector('h1').innerText", lambda title: title == "Pool kvpool-system/spare")
    assert text(browser, "nav [aria-current]") == "kvpool-system/spare"
    assert "No node serves." in text(browser, "#nodes")


FOCUSED = """(() => { const e = document.activeElement, s = getComputedStyle(e);
  const name = e.dataset.key || e.getAttribute('aria-label') || e.className || e.innerText;
  return [e.tagName, name, s.outlineStyle].join(' '); })()"""

# contrast of text against the nearest background, by WCAG 2.2 (1.4.3): 4.5, or 3 for large text
CONTRAST = """(() => {
  const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const linear = v => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
  const bad = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    const e = node.parentElement;
    if (!node.data.trim() || !e.offsetParent || e.closest('script, style, noscript, .hidden')) continue;
    const style = getComputedStyle(e), [a, b] = [light(parse(style.color)), light(ground(e))].sort((x, y) => y - x);
    const large = parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 650;
    if ((a + 0.05) / (b + 0.05) < (large ? 3 : 4.5)) bad.push(node.data + ' ' + ((a + 0.05) / (b + 0.05)).toFixed(2));
  }
  return bad; })()"""
