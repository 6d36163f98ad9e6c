"""What selects a pod, and which pool it gets: the pod's annotation, then a pool's selector, then its namespace."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvpool_operator.injection.annotations import opted_in, opted_out, parse_annotations
from kvpool_operator.injection.engine_start import _COMMANDS, _MODULES, _PROGRAMS, recognize
from kvpool_operator.injection.pool_selection import ENGINE_WORDS, NamespaceView, mark_selected, select
from kvpool_operator.injection.skip import Skip, SkipReason


@dataclass(frozen=True)
class Pool:
    name: str
    namespace: str = "kvpool-system"
    pod_selector: dict[str, Any] | None = None
    enabled: bool = True
    allowed: tuple[str, ...] = ("team",)

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    def allows(self, namespace: str, labels: Any) -> bool:
        return namespace in (*self.allowed, self.namespace)


@dataclass
class World:
    """One pod in namespace `team`."""

    pools: list[Pool]
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    namespace: NamespaceView = field(default_factory=NamespaceView)

    def pod(self) -> dict[str, Any]:
        return {"metadata": {"labels": self.labels, "annotations": self.annotations}}

    def selected(self) -> tuple[str, str]:
        by, pool = select(self.pools, parse_annotations(self.pod()), "team", self.namespace)
        return by, pool.key if pool else ""

    def skipped(self) -> tuple[SkipReason, str, str]:
        with pytest.raises(Skip) as e:
            self.selected()
        return e.value.reason, e.value.selected_by, e.value.message


APP = {"app": "llm"}
SELECTING = Pool("chat", pod_selector={"matchLabels": APP})
LABELED = {"kvpool.dev/inject": "true"}
ENABLED = NamespaceView({"kvpool.dev/inject": "enabled"})


def test_a_pod_without_any_label_is_not_selected():
    assert World([Pool("chat")]).selected() == ("", "")
    assert World([SELECTING], {"app": "web"}).selected() == ("", "")
    assert World([Pool("chat")], annotations={"kvpool.dev/pool": "chat"}).selected() == ("", "")


@pytest.mark.parametrize("value", ["enabled", "true"])
def test_a_namespace_selects_its_pods(value):
    world = World([Pool("chat")], namespace=NamespaceView({"kvpool.dev/inject": value}))
    assert world.selected() == ("namespace", "kvpool-system/chat")


def test_a_namespace_names_the_pool_of_its_pods_also_of_labeled_ones():
    view = NamespaceView(ENABLED.labels, {"kvpool.dev/pool": "kvpool-system/batch"})
    pools = [Pool("chat"), Pool("batch")]
    assert World(pools, namespace=view).selected() == ("namespace", "kvpool-system/batch")
    assert World(pools, LABELED, namespace=view).selected() == ("label", "kvpool-system/batch")
    only_named = NamespaceView({}, view.annotations)
    assert World(pools, LABELED, namespace=only_named).selected() == ("label", "kvpool-system/batch")
    assert World(pools, namespace=only_named).selected() == ("", "")


def test_a_pool_selects_pods_of_the_namespaces_that_it_allows():
    assert World([SELECTING], APP).selected() == ("pool", "kvpool-system/chat")
    elsewhere = Pool("chat", pod_selector={"matchLabels": APP}, allowed=())
    assert World([elsewhere], APP).selected() == ("", "")
    disabled = Pool("chat", pod_selector={"matchLabels": APP}, enabled=False)
    assert World([disabled], APP).selected() == ("", "")


def test_the_annotation_of_the_pod_precedes_the_selector_which_precedes_the_namespace():
    pools = [SELECTING, Pool("batch"), Pool("bulk")]
    view = NamespaceView(ENABLED.labels, {"kvpool.dev/pool": "batch"})
    assert World(pools, APP, namespace=view).selected() == ("pool", "kvpool-system/chat")
    assert World(pools, {}, namespace=view).selected() == ("namespace", "kvpool-system/batch")
    noted = {"kvpool.dev/pool": "bulk"}
    assert World(pools, APP, noted, view).selected() == ("pool", "kvpool-system/bulk")
    assert World(pools, APP | LABELED, {}, view).selected() == ("label", "kvpool-system/chat")


def test_a_pod_that_two_pools_select_is_not_injected_and_both_are_named():
    pools = [SELECTING, Pool("batch", pod_selector={"matchExpressions": [{"key": "app", "operator": "Exists"}]})]
    reason, by, message = World(pools, APP).skipped()
    assert (reason, by) == (SkipReason.POOL_AMBIGUOUS, "pool")
    assert "kvpool-system/batch, kvpool-system/chat" in message
    assert World(pools, APP, {"kvpool.dev/pool": "chat"}).selected() == ("pool", "kvpool-system/chat")


@pytest.mark.parametrize("value", ["disabled", "false"])
def test_a_namespace_can_exclude_its_pods_from_selectors_but_not_labeled_ones(value):
    view = NamespaceView({"kvpool.dev/inject": value})
    assert World([SELECTING], APP, namespace=view).selected() == ("", "")
    assert World([SELECTING], APP | LABELED, namespace=view).selected() == ("label", "kvpool-system/chat")


def test_a_namespaces_annotation_that_cannot_be_read_is_named_with_the_namespace():
    world = World([Pool("chat")], namespace=NamespaceView(ENABLED.labels, {"kvpool.dev/pool": "a/b/c"}))
    reason, by, message = world.skipped()
    assert (reason, by) == (SkipReason.BAD_ANNOTATION, "namespace")
    assert message.startswith("namespace team: ")


@pytest.mark.parametrize("by", ["pool", "namespace"])
def test_a_selected_pod_is_labeled_for_those_who_watch_and_is_judged_again_later(by):
    pod = World([], APP).pod()
    mark_selected(pod, by)
    assert pod["metadata"]["labels"] == APP | LABELED
    assert pod["metadata"]["annotations"] == {"kvpool.dev/selected-by": by}
    assert not opted_in(pod)
    labeled = World([], LABELED).pod()
    mark_selected(labeled, "label")
    assert opted_in(labeled)


@pytest.mark.parametrize("value", ["false", "disabled", "true", "enabled"])
def test_a_pod_opts_out_by_its_label(value):
    is_out = value in ("false", "disabled")
    assert opted_out({"metadata": {"labels": {"kvpool.dev/inject": value}}}) is is_out
    assert not opted_out({"metadata": {"labels": None}})


def test_every_command_that_is_recognized_has_a_word_by_which_the_api_server_matches_it():
    commands = [*_MODULES, *_PROGRAMS, *(" ".join(words) for words in _COMMANDS)]
    assert [c for c in commands if not any(word in c for word in ENGINE_WORDS)] == []


@pytest.mark.parametrize(
    "image", ["vllm/vllm-openai", "ghcr.io/llm-d/llm-d-cuda", "kserve/huggingfaceserver", "r/ray-llm"]
)
def test_every_image_that_is_recognized_has_one_too(image):
    assert recognize("c", [], ["--model", "m"], image).engine
    assert any(word in image for word in ENGINE_WORDS)
