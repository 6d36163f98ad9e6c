"""Whether files are what CycloneDX's own schema says (run by the audit's tools, which have it)."""

from __future__ import annotations

import sys
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

wrong = 0
for name in sys.argv[1:]:
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(Path(name).read_text()):
        print(f"{name}: {str(error)[:500]}", file=sys.stderr)
        wrong = 1
    else:
        print(f"{name}: valid CycloneDX 1.6")
sys.exit(wrong)
