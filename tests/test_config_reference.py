"""docs/reference/config.md is complete and up to date."""

import dataclasses
import inspect

import config_reference

from kvpool import config


def test_the_page_is_up_to_date() -> None:
    assert config_reference.main(["--check"]) == 0


def test_the_page_has_every_configuration_class_and_field() -> None:
    text = config_reference.PAGE.read_text()
    defined = [kind for _, kind in inspect.getmembers(config, dataclasses.is_dataclass)]
    assert len(defined) > 10
    for kind in defined:
        assert f"\n## {kind.__name__}\n" in text
        section = text.split(f"\n## {kind.__name__}\n")[1].split("\n## ")[0]
        assert all(f"| `{field.name}` |" in section for field in dataclasses.fields(kind)), kind
