"""The config section ``label.cost``, and the values of quality that rules can use."""

from pydantic import Field

from posttrain.store.section import Section

VALUE_NAMES = {
    "label.answers": "answers of people in the queue",
    "label.agreement": "share of equal pairs among people's answers to one item",
    "label.alpha": "Krippendorff's alpha of people's answers, nominal",
    "label.gold_accuracy": "share of gold items that people answered right",
    "label.alarms": "alarms of the quality report",
}
"""Names of values in the rules of triggers and gates; they are not numbers where nothing is measured."""


class CostConfig(Section):
    """The price of people's work."""

    per_hour: float = Field(0.0, ge=0, description="Price of an hour of an annotator.")
    per_label: float = Field(0.0, ge=0, description="Price of a label, on top of the hours.")
