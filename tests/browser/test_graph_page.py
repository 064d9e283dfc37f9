"""The page `/stageline` in Chromium: what is in view when it is opened, and while it is looked at."""

from __future__ import annotations

from playwright.sync_api import Page, Route, expect

from pipeline.graph.display import NodeState, NodeStatus
from pipeline.graph.graph import Gang, GraphSpec, step_nodes
from pipeline.observe import graph_page
from pipeline.observe.curves import run_curves
from pipeline.observe.graph_view import GraphView, RunFacts, gang_view, gangs_by_role, node_views, nodes_to_show
from pipeline.observe.node_events import NodeEvents
from stages.models.protocol import Role

SPEC = GraphSpec(steps=40, shards=2, staleness=2, eval_every=2)
GANGS = (
    Gang("engine", frozenset({Role.GENERATE}), 1, 2),
    Gang("score", frozenset({Role.SCORE, Role.ADVANTAGE}), 1),
    Gang("train", frozenset({Role.POLICY, Role.REFERENCE, Role.CRITIC}), 1),
)
ROOT = "http://run.test"


def view(admitted: int) -> GraphView:
    """Return the view of a run in step 20, with one running and one queued score."""
    states = {("score", 20, 0): NodeState.RUNNING, ("score", 20, 1): NodeState.QUEUED}
    statuses = [
        NodeStatus(node, states.get((node.stage, node.address.step, node.address.shard), NodeState.WAITING))
        for step in range(20, admitted)
        for node in step_nodes(SPEC, step)
    ]
    nodes = node_views(nodes_to_show(SPEC, statuses, admitted), gangs_by_role(GANGS), NodeEvents(), admitted)
    gangs = tuple(gang_view(gang, True, nodes, None) for gang in GANGS)
    facts = RunFacts("run", SPEC.steps, SPEC.staleness)
    curves = run_curves({step: {"reward/mean": step / 10, "kl/ref": 0.5} for step in range(admitted - 4)}, 0, [])
    return GraphView(facts, True, True, False, 0.0, admitted - 4, nodes, gangs, (), curves, ())


def opened(page: Page) -> None:
    """The page with the headers that it is served with; whoever looks again finds it a step further."""

    def answer(route: Route) -> None:
        again = route.request.url.endswith("/view")
        body = graph_page.render_fragment(view(25)) if again else graph_page.render_page(view(24))
        route.fulfill(body=body, headers={**graph_page.HEADERS, "Content-Type": "text/html; charset=utf-8"})

    page.route(f"{ROOT}/**", answer)
    page.goto(f"{ROOT}/{graph_page.PATH}")


def assert_in_view(page: Page, head: str) -> None:
    box = page.get_by_text(head, exact=True).bounding_box()
    assert 0 <= box["x"] < box["x"] + box["width"] <= 1280


def test_stages_and_the_newest_steps_are_in_view_on_opening(page: Page) -> None:
    opened(page)
    box = page.locator(".scroll")
    assert box.evaluate("box => box.scrollWidth > box.clientWidth"), "more columns than the window has room for"
    left = box.evaluate("box => box.getBoundingClientRect().left")
    stages = page.locator("svg.stages text").evaluate_all(
        "texts => texts.map(t => [t.textContent, t.getBoundingClientRect().left, t.getBoundingClientRect().right])"
    )
    assert {"publish", "generate", "evaluate_reference"} <= {stage for stage, _, _ in stages}
    assert all(0 <= start < end <= left for _, start, end in stages)
    assert_in_view(page, "step 23")
    page.get_by_text("step 21 of 40").wait_for()
    assert_in_view(page, "step 24")


def test_a_look_later_it_has_gone_on_and_who_scrolled_stays_there(page: Page) -> None:
    opened(page)
    page.locator(".scroll").evaluate("box => { box.scrollLeft = 10 }")
    page.get_by_text("step 21 of 40").wait_for()
    assert page.locator(".scroll").evaluate("box => box.scrollLeft") == 10
    assert page.get_by_text("score 20.0, 1 queued").is_visible()
    assert page.locator("rect.queued").count() == 1


def test_curves_tell_a_step_and_go_on(page: Page) -> None:
    opened(page)
    reward = page.locator(".panel", has_text="Reward")
    expect(reward.locator(".reading")).to_have_text("1.9")
    reward.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("step 0")
    page.get_by_text("step 21 of 40").wait_for()
    expect(reward.locator(".reading")).to_have_text("2")
    expect(page.locator(".panel")).to_have_count(2)
