"""The chart's webhook configurations: which pods the API server sends to the webhook."""

from op_chart import needs_helm, one, render

from kvpool_operator.api.annotations import LABEL_INJECT, NAMESPACE_OPT_IN, OPT_OUT
from kvpool_operator.injection.pool_selection import ENGINE_WORDS
from kvpool_operator.webhook.selector_hooks import UNLABELED


@needs_helm
def test_the_webhook_can_never_stop_pods_of_the_system_or_its_own():
    hooks = one(render(), "MutatingWebhookConfiguration", "kvpool-webhook")["webhooks"]
    for hook in hooks:
        assert hook["failurePolicy"] == "Ignore"
        assert hook["timeoutSeconds"] == 3
        assert hook["sideEffects"] == "None"
        assert hook["matchPolicy"] == "Equivalent"
        assert hook["reinvocationPolicy"] == "IfNeeded"
        excluded = hook["namespaceSelector"]["matchExpressions"][0]
        assert excluded["operator"] == "NotIn"
        assert excluded["values"] == ["kube-system", "kube-node-lease", "kvpool-system"]
        (rule,) = hook["rules"]
        assert (rule["operations"], rule["resources"], rule["scope"]) == (["CREATE"], ["pods"], "Namespaced")
    labeled, of_namespace = hooks
    assert labeled["objectSelector"] == {"matchLabels": {"kvpool.dev/inject": "true"}}
    assert len(labeled["namespaceSelector"]["matchExpressions"]) == 1
    assert of_namespace["namespaceSelector"]["matchExpressions"][1:] == [
        {"key": LABEL_INJECT, "operator": "In", "values": list(NAMESPACE_OPT_IN)}
    ]
    (excluded,) = of_namespace["objectSelector"]["matchExpressions"]
    assert excluded == {"key": LABEL_INJECT, "operator": "NotIn", "values": list(OPT_OUT)}


@needs_helm
def test_only_what_looks_like_an_engine_waits_for_the_webhook_of_its_namespace():
    _, hook = one(render(), "MutatingWebhookConfiguration", "kvpool-webhook")["webhooks"]
    unlabeled, engine = hook["matchConditions"]
    assert unlabeled == UNLABELED
    assert f"matches('{'|'.join(ENGINE_WORDS)}')" in engine["expression"]


@needs_helm
def test_webhooks_for_selectors_are_the_webhooks_own_and_failures_of_the_chart_are_not_theirs():
    objects = render('webhook.failurePolicy="Fail"')
    assert "webhooks" not in one(objects, "MutatingWebhookConfiguration", "kvpool-webhook-selectors")
    labeled, of_namespace = one(objects, "MutatingWebhookConfiguration", "kvpool-webhook")["webhooks"]
    assert (labeled["failurePolicy"], of_namespace["failurePolicy"]) == ("Fail", "Ignore")
