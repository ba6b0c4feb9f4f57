"""The model behind the chart's values: what needs no Helm."""

import json
from typing import Any

import pytest
import yaml

from helm.chart_files import CHART, schema_text, table, values_yaml
from helm.values import ChartValues
from kvtier.appliance.config import Settings
from tests.helm.charts import VALUE_SETS, values_of

SCHEMA = json.loads(schema_text())


def test_there_are_enough_value_sets() -> None:
    assert len(VALUE_SETS) >= 8


def test_every_default_fits_the_model_and_the_policy() -> None:
    values = yaml.safe_load(values_yaml())
    Settings.model_validate(values.pop("policy"))
    assert ChartValues.model_validate(values) == ChartValues()


def test_every_value_is_described_where_it_stands_and_in_the_table() -> None:
    rows = [line.split(" | ") for line in table().splitlines()[2:]]
    assert len(rows) > 80
    assert [row[0] for row in rows if not row[2].strip(" |")] == []
    assert values_yaml().count("# -- ") == len(rows)


def test_the_schema_holds_every_setting_of_the_policy() -> None:
    model = Settings.model_json_schema(by_alias=True, mode="validation")
    there = SCHEMA["$defs"]["Settings"]["properties"]
    assert set(there) == set(model["properties"])
    for name, described in model["$defs"].items():
        if "properties" in described:
            assert set(SCHEMA["$defs"][name]["properties"]) == set(described["properties"]), name
            further = SCHEMA["$defs"][name]["additionalProperties"]
            assert (further is False) == (described["additionalProperties"] is False), name


def test_no_schema_shows_a_default_that_nobody_applies() -> None:
    assert '"default"' not in schema_text()


def test_a_packaged_chart_keeps_its_schema() -> None:
    assert "values.schema.json" not in [
        line for line in (CHART / ".helmignore").read_text().splitlines() if not line.startswith("#")
    ]


@pytest.mark.parametrize("path", VALUE_SETS, ids=lambda path: path.stem)
def test_every_value_set_fits_the_model(path: Any) -> None:
    values = values_of(path)
    for shape in (values, *values.get("nodeGroups", ())):
        shape.pop(
            "policy", None
        )  # the paths that the chart fills in are missing; test_chart.py looks at those
    ChartValues.model_validate(values)
