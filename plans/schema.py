"""plans/schema.json: the JSON Schema of plan.yaml for editors, made from the models.

Write it anew with: python -m meshwright.plans.schema > plans/schema.json
Its root is a whole plan; `#/$defs/Declaration` is a file for `compile --from`. An editor that knows YAML schemas takes
it from this line in the file:

    # yaml-language-server: $schema=PATH/plans/schema.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic.json_schema import models_json_schema

from meshwright.plans.document import Declaration, PlanDocument
from meshwright.plans.reading import EXPECTED

_OWNERS: Mapping[str, tuple[str, ...]] = {
    "": ("PlanDocument", "Declaration"),
    "model": ("ModelSource", "ModelDeclaration"),
    "stages": ("Stage", "StageDeclaration"),
    "stages.memory": ("Memory",),
    "kinds": ("Kind", "KindDeclaration"),
    "recomputed": ("Recomputed", "RecomputedDeclaration"),
    "predicted": ("Predicted",),
}
"""Models that hold the keys below a path of EXPECTED."""


def schema_text() -> str:
    """Text of schema.json."""
    _, schema = models_json_schema(
        [(PlanDocument, "validation"), (Declaration, "validation")], title="meshwright plan"
    )
    definitions = schema["$defs"]
    for path, text in EXPECTED.items():
        parent, _, key = path.rpartition(".")
        for owner in _OWNERS[parent]:
            definitions[owner]["properties"][key]["description"] = text
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$ref": "#/$defs/PlanDocument"}
    return json.dumps({**head, **schema}, indent=1) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
