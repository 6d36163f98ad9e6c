"""`kvpool fingerprints diff`: which settings keep two engines from sharing blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_cli.cluster import source
from kvpool_cli.errors import FINDINGS, OK, NotFoundError
from kvpool_cli.output import Style, emit, table

if TYPE_CHECKING:
    import argparse

    from kvpool_cli.cluster.documents import Documents

NAME = "fingerprints"
HELP = "compare the fingerprints of two engine pods"
DESCRIPTION = "Compare the inputs of the fingerprints of two engine pods. Values are 8-digit digests."
CLUSTER = True

_PROMPT = "prompt."  # of fields that are no part of the fingerprint: tokenizer and chat template


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action and the pods."""
    parser.add_argument("action", choices=("diff",), help="what to do")
    parser.add_argument("one", metavar="NAMESPACE/POD", help="an engine pod")
    parser.add_argument("other", metavar="NAMESPACE/POD", help="another engine pod")
    source.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the fields; exit code 1 if they differ."""
    from kvpool_cli.cluster.pods import pod_name

    documents, namespace = source.documents_of(args), source.namespace_of(args)
    names = ["/".join(pod_name(text, namespace)) for text in (args.one, args.other)]
    found = [fingerprints_of(documents, name) for name in names]
    one, other, rows = closest(found[0], found[1])
    differing = [row["field"] for row in rows if not row["equal"] and not row["field"].startswith(_PROMPT)]
    prompts = [row["field"].removeprefix(_PROMPT) for row in rows if _differs_in_prompts(row)]
    shared = one["digest"] == other["digest"]
    data = {"pods": names, "digests": [one["digest"], other["digest"]], "equal": shared, "fields": rows}

    def text(style: Style) -> str:
        cells = [[r["field"], r["values"][0], r["values"][1], "" if r["equal"] else "<- differs"] for r in rows]
        verdict = "These engines share their blocks." if shared else "These engines share nothing. To share: the same "
        verdict += "" if shared else f"{', '.join(differing) or 'version of the client (fields are not reported)'}."
        if prompts:
            verdict += f" They turn prompts into tokens differently: {', '.join(prompts)}."
        return "\n".join([table(cells, ("FIELD", *names, ""), style=style), "", verdict])

    emit(args, data, text)
    return OK if shared else FINDINGS


def fingerprints_of(documents: Documents, pod: str) -> list[dict[str, Any]]:
    """The fingerprints that a pod's engine reported, connected ones first. Raises NotFoundError."""
    uids = {
        p["metadata"].get("uid")
        for p in documents.of("engine_pods")
        if f"{p['metadata'].get('namespace')}/{p['metadata'].get('name')}" == pod
    }
    if not uids:
        raise NotFoundError(f"no pod {pod} has the label kvpool.dev/inject")
    rows = []
    for answer in documents.statuses.values():
        for fingerprint in answer["status"].get("fingerprints") or []:
            mine = [p for p in fingerprint.get("pods") or [] if p.get("uid") in uids]
            if mine:
                rows.append((not any(p.get("connected") for p in mine), fingerprint))
    if not rows:
        raise NotFoundError(f"no engine of {pod} has reported a fingerprint: kubectl kvpool doctor pod/{pod}")
    return [fingerprint for _, fingerprint in sorted(rows, key=lambda row: (row[0], str(row[1].get("digest"))))]


def closest(
    one: list[dict[str, Any]], other: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """The most similar pair, with its fields; fields that differ come first."""
    pairs = [(a, b, _rows(a.get("fields") or {}, b.get("fields") or {})) for a in one for b in other]
    return min(pairs, key=lambda pair: (pair[0]["digest"] != pair[1]["digest"], sum(not r["equal"] for r in pair[2])))


def _differs_in_prompts(row: dict[str, Any]) -> bool:
    return not row["equal"] and row["field"].startswith(_PROMPT) and "-" not in row["values"]


def _rows(one: dict[str, str], other: dict[str, str]) -> list[dict[str, Any]]:
    last = ("block_bytes", "groups", "hf_config", "format")
    names = sorted({*one, *other}, key=lambda name: (one.get(name) == other.get(name), name in last, name))
    return [
        {"field": n, "values": [one.get(n, "-"), other.get(n, "-")], "equal": one.get(n) == other.get(n)} for n in names
    ]
